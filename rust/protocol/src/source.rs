//! The bytes of one message, and what is learnt beside its values while `rmp-serde` reads it.

use std::cell::{Cell, RefCell};
use std::io::{self, Read};
use std::ops::Range;

use crate::error::{DecodeError, DecodeErrorKind as Kind};

/// A message that is being read.
///
/// `rmp-serde` says neither where it is in a borrowed slice nor what a visitor's error was about, and both are needed:
/// for bytes left over, for values kept as their bytes, to tell bytes from text that is not UTF-8, and for the reason of
/// a refusal. So it reads from here.
pub(crate) struct Source<'a> {
    bytes: &'a [u8],
    rest: Cell<&'a [u8]>,
    buffers: &'a [&'a [u8]],
    skipped: Cell<u64>,
    failure: Cell<Option<Kind>>,
    /// Of the value at fault, innermost name first.
    path: RefCell<Vec<String>>,
    /// Ids of requests, for who wants them even from a message that is refused.
    recovered: RefCell<Vec<String>>,
}

impl Read for &Source<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut rest = self.rest.get();
        let outcome = rest.read(buffer);
        self.rest.set(rest);
        outcome
    }

    fn read_exact(&mut self, buffer: &mut [u8]) -> io::Result<()> {
        let mut rest = self.rest.get();
        let outcome = rest.read_exact(buffer);
        self.rest.set(rest);
        outcome
    }
}

impl<'a> Source<'a> {
    pub fn new(bytes: &'a [u8], buffers: &'a [&'a [u8]]) -> Self {
        Self {
            bytes,
            rest: Cell::new(bytes),
            buffers,
            skipped: Cell::new(0),
            failure: Cell::new(None),
            path: RefCell::default(),
            recovered: RefCell::default(),
        }
    }

    /// Consumes a nil, if one is next. Most elements are nil, and this saves the decoder, which never reads ahead, a visit
    /// to each.
    pub fn nil(&self) -> bool {
        let rest = self.rest.get().strip_prefix(&[0xc0]);
        self.rest.set(rest.unwrap_or(self.rest.get()));
        rest.is_some()
    }

    /// Bytes not yet read.
    pub fn rest(&self) -> &'a [u8] {
        self.rest.get()
    }

    /// How many bytes have been read.
    pub fn position(&self) -> usize {
        self.bytes.len() - self.rest.get().len()
    }

    /// Bytes already read, from [`Source::position`] to [`Source::position`].
    pub fn slice(&self, range: Range<usize>) -> &'a [u8] {
        &self.bytes[range]
    }

    /// Auxiliary buffer by its 1-based index.
    pub fn buffer(&self, index: u64) -> Result<&'a [u8], Kind> {
        let found = usize::try_from(index).ok().and_then(|index| self.buffers.get(index.checked_sub(1)?));
        found.copied().ok_or(Kind::MissingBuffer(index))
    }

    /// Elements behind the last known one of their array, passed over so far.
    pub fn skipped(&self) -> u64 {
        self.skipped.get()
    }

    pub fn count_skipped(&self) {
        self.skipped.set(self.skipped.get() + 1);
    }

    pub fn recover(&self, request_id: Option<String>) {
        self.recovered.borrow_mut().extend(request_id);
    }

    pub fn recovered(self) -> Vec<String> {
        self.recovered.into_inner()
    }

    /// The error to return for a refusal, which is kept here as no error of `serde` can carry it.
    #[cold]
    pub fn refuse<E: serde::de::Error>(&self, kind: Kind) -> E {
        self.failure.set(Some(kind));
        E::custom("refused")
    }

    /// As [`Source::refuse`], for the field of that name.
    #[cold]
    pub fn refuse_at<E: serde::de::Error>(&self, name: &str, kind: Kind) -> E {
        self.at(name);
        self.refuse(kind)
    }

    /// Puts the name of the enclosing field in front of the path of the error that passes by.
    #[cold]
    pub fn at(&self, name: &str) {
        self.path.borrow_mut().push(name.to_owned());
    }

    /// A map's value that has no default.
    pub fn required<T, E: serde::de::Error>(&self, slot: Option<T>, name: &str) -> Result<T, E> {
        slot.ok_or_else(|| self.refuse_at(name, Kind::Missing))
    }

    /// What went wrong, after the decoder gave up with `error`.
    pub fn failure(&self, error: &rmp_serde::decode::Error) -> DecodeError {
        use rmp_serde::decode::Error;
        let kind = match error {
            Error::DepthLimitExceeded => Kind::TooDeep,
            Error::Utf8Error(_) => Kind::InvalidUtf8,
            Error::TypeMismatch(_) => Kind::Reserved,
            Error::Syntax(_) => self.failure.take().unwrap_or(Kind::Truncated),
            _ => Kind::Truncated,
        };
        self.path.take().iter().fold(kind.into(), |error: DecodeError, name| error.at(name))
    }
}
