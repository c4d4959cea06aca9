//! Positional structs: arrays whose elements are fields, tolerant of shorter and of longer ones.

use crate::error::DecodeErrorKind as Kind;
use crate::reader::{Reader, Result};

/// The elements of an array that is being read as a struct.
pub(crate) struct Fields {
    left: usize,
}

impl Fields {
    /// Enters the array.
    pub fn open(reader: &mut Reader<'_>) -> Result<Self> {
        Ok(Self { left: reader.array()? })
    }

    fn advance(&mut self) -> bool {
        let present = self.left > 0;
        self.left -= usize::from(present);
        present
    }

    /// An element that must be there.
    pub fn required<'a, T>(
        &mut self,
        reader: &mut Reader<'a>,
        name: &'static str,
        read: impl FnOnce(&mut Reader<'a>) -> Result<T>,
    ) -> Result<T> {
        let value = if self.advance() { read(reader) } else { Err(Kind::Missing.into()) };
        value.map_err(|error| error.at(name))
    }

    /// An element that takes its default when the array ends before it; an explicit nil is an error.
    pub fn defaulted<'a, T: Default>(
        &mut self,
        reader: &mut Reader<'a>,
        name: &'static str,
        read: impl FnOnce(&mut Reader<'a>) -> Result<T>,
    ) -> Result<T> {
        if self.advance() { read(reader).map_err(|error| error.at(name)) } else { Ok(T::default()) }
    }

    /// An element that may be nil or absent.
    pub fn optional<'a, T>(
        &mut self,
        reader: &mut Reader<'a>,
        name: &'static str,
        read: impl FnOnce(&mut Reader<'a>) -> Result<T>,
    ) -> Result<Option<T>> {
        if !self.advance() || reader.nil().map_err(|error| error.at(name))? {
            return Ok(None);
        }
        read(reader).map(Some).map_err(|error| error.at(name))
    }

    /// Passes over the elements behind the last known one, counts them, and leaves the array.
    pub fn close(self, reader: &mut Reader<'_>) -> Result<()> {
        for _ in 0..self.left {
            reader.skip()?;
        }
        reader.skipped += self.left as u64;
        reader.leave();
        Ok(())
    }
}
