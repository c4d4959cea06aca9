//! A strict MessagePack reader over one payload: refuses what the field's type does not allow, never what is merely new.

use rmp::Marker;

use crate::error::{DecodeError, DecodeErrorKind as Kind};

/// Deepest nesting of arrays and maps in a message.
pub const MAX_DEPTH: usize = 64;

/// Extension type of raw array bytes; all others are refused.
pub(crate) const ARRAY_EXTENSION: i8 = 3;

pub(crate) type Result<T> = std::result::Result<T, DecodeError>;

/// Cursor over the bytes of one message and its auxiliary buffers.
pub(crate) struct Reader<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) position: usize,
    pub(super) depth: usize,
    buffers: &'a [&'a [u8]],
    /// Elements behind the last known one of their array, passed over so far.
    pub skipped: u64,
}

/// The family of a marker, in words.
pub(super) const fn family(marker: Marker) -> &'static str {
    match marker {
        Marker::Null => "nil",
        Marker::True | Marker::False => "a boolean",
        Marker::FixPos(_)
        | Marker::FixNeg(_)
        | Marker::U8
        | Marker::U16
        | Marker::U32
        | Marker::U64
        | Marker::I8
        | Marker::I16
        | Marker::I32
        | Marker::I64 => "an integer",
        Marker::F32 | Marker::F64 => "a float",
        Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => "a string",
        Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => "bytes",
        Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => "an array",
        Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => "a map",
        Marker::Reserved => "the reserved byte",
        _ => "an extension type",
    }
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8], buffers: &'a [&'a [u8]]) -> Self {
        Self { bytes, position: 0, depth: 0, buffers, skipped: 0 }
    }

    /// Checks that the payload ends here.
    pub fn finish(&self) -> Result<()> {
        match self.bytes.len() - self.position {
            0 => Ok(()),
            left => Err(Kind::TrailingBytes(left).into()),
        }
    }

    /// Auxiliary buffer by its 1-based index.
    pub fn buffer(&self, index: u64) -> Result<&'a [u8]> {
        let found = usize::try_from(index).ok().and_then(|index| self.buffers.get(index.checked_sub(1)?));
        found.copied().ok_or_else(|| Kind::MissingBuffer(index).into())
    }

    pub(super) fn peek(&self) -> Result<Marker> {
        self.bytes.get(self.position).map(|byte| Marker::from_u8(*byte)).ok_or_else(|| Kind::Truncated.into())
    }

    fn marker(&mut self) -> Result<Marker> {
        let marker = self.peek()?;
        self.position += 1;
        Ok(marker)
    }

    pub(super) fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let taken = self.bytes[self.position..].get(..length).ok_or(Kind::Truncated)?;
        self.position += length;
        Ok(taken)
    }

    fn big_endian<const N: usize>(&mut self) -> Result<[u8; N]> {
        let taken = self.bytes[self.position..].first_chunk::<N>().ok_or(Kind::Truncated)?;
        self.position += N;
        Ok(*taken)
    }

    pub(super) fn length(&mut self, width: usize) -> Result<usize> {
        Ok(match width {
            1 => usize::from(u8::from_be_bytes(self.big_endian()?)),
            2 => usize::from(u16::from_be_bytes(self.big_endian()?)),
            _ => u32::from_be_bytes(self.big_endian()?) as usize,
        })
    }

    /// Consumes a nil, if one is next.
    pub fn nil(&mut self) -> Result<bool> {
        let nil = self.peek()? == Marker::Null;
        self.position += usize::from(nil);
        Ok(nil)
    }

    /// Whether a string is next.
    pub fn at_text(&self) -> Result<bool> {
        Ok(matches!(self.peek()?, Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32))
    }

    pub fn boolean(&mut self) -> Result<bool> {
        match self.marker()? {
            Marker::True => Ok(true),
            Marker::False => Ok(false),
            other => Err(wrong_type("a boolean", other)),
        }
    }

    pub(super) fn integer_after(&mut self, marker: Marker, expected: &'static str) -> Result<i128> {
        Ok(match marker {
            Marker::FixPos(value) => value.into(),
            Marker::FixNeg(value) => value.into(),
            Marker::U8 => u8::from_be_bytes(self.big_endian()?).into(),
            Marker::U16 => u16::from_be_bytes(self.big_endian()?).into(),
            Marker::U32 => u32::from_be_bytes(self.big_endian()?).into(),
            Marker::U64 => u64::from_be_bytes(self.big_endian()?).into(),
            Marker::I8 => i8::from_be_bytes(self.big_endian()?).into(),
            Marker::I16 => i16::from_be_bytes(self.big_endian()?).into(),
            Marker::I32 => i32::from_be_bytes(self.big_endian()?).into(),
            Marker::I64 => i64::from_be_bytes(self.big_endian()?).into(),
            other => return Err(wrong_type(expected, other)),
        })
    }

    pub fn u64(&mut self) -> Result<u64> {
        let marker = self.marker()?;
        let value = self.integer_after(marker, "an integer")?;
        u64::try_from(value).map_err(|_| Kind::OutOfRange("an unsigned 64-bit integer").into())
    }

    pub fn i64(&mut self) -> Result<i64> {
        let marker = self.marker()?;
        let value = self.integer_after(marker, "an integer")?;
        i64::try_from(value).map_err(|_| Kind::OutOfRange("a signed 64-bit integer").into())
    }

    pub fn u32(&mut self) -> Result<u32> {
        let marker = self.marker()?;
        let value = self.integer_after(marker, "an integer")?;
        u32::try_from(value).map_err(|_| Kind::OutOfRange("an unsigned 32-bit integer").into())
    }

    /// A float of either width, or an integer; as senders that write 1 for 1.0 exist.
    pub fn f64(&mut self) -> Result<f64> {
        match self.marker()? {
            Marker::F32 => Ok(f32::from_be_bytes(self.big_endian()?).into()),
            Marker::F64 => Ok(f64::from_be_bytes(self.big_endian()?)),
            marker => {
                let value = self.integer_after(marker, "a float")?;
                #[expect(clippy::cast_precision_loss, reason = "that is what a float field holds")]
                Ok(value as f64)
            }
        }
    }

    /// A finite float that a 32-bit float can hold (in range; precision is kept).
    pub fn f64_in_f32_range(&mut self) -> Result<f64> {
        let value = self.f64()?;
        if value.is_finite() && value.abs() <= f64::from(f32::MAX) {
            return Ok(value);
        }
        Err(Kind::OutOfRange("a finite 32-bit float").into())
    }

    pub fn text(&mut self) -> Result<&'a str> {
        let length = match self.marker()? {
            Marker::FixStr(length) => usize::from(length),
            Marker::Str8 => self.length(1)?,
            Marker::Str16 => self.length(2)?,
            Marker::Str32 => self.length(4)?,
            other => return Err(wrong_type("a string", other)),
        };
        std::str::from_utf8(self.take(length)?).map_err(|_| Kind::InvalidUtf8.into())
    }

    pub fn string(&mut self) -> Result<String> {
        self.text().map(str::to_owned)
    }

    /// Bytes of an extension value of type 3, or of the auxiliary buffer that an index names.
    pub fn array_data(&mut self) -> Result<&'a [u8]> {
        let marker = self.marker()?;
        let length = match marker {
            Marker::FixExt1 => 1,
            Marker::FixExt2 => 2,
            Marker::FixExt4 => 4,
            Marker::FixExt8 => 8,
            Marker::FixExt16 => 16,
            Marker::Ext8 => self.length(1)?,
            Marker::Ext16 => self.length(2)?,
            Marker::Ext32 => self.length(4)?,
            _ => {
                let index = self.integer_after(marker, "raw array bytes or the index of a buffer")?;
                return self.buffer(u64::try_from(index).map_err(|_| Kind::OutOfRange("a buffer index"))?);
            }
        };
        let [code] = self.big_endian()?;
        match i8::from_be_bytes([code]) {
            ARRAY_EXTENSION => self.take(length),
            other => Err(Kind::RefusedExtension(other).into()),
        }
    }

    /// Enters an array or map whose elements need at least `least` bytes together; [`Reader::leave`] ends it.
    fn enter(&mut self, least: usize) -> Result<()> {
        // A length is believed only as far as bytes are there to fill it, so it is safe to allocate by.
        if least > self.bytes.len() - self.position {
            return Err(Kind::Truncated.into());
        }
        self.depth += 1;
        if self.depth > MAX_DEPTH { Err(Kind::TooDeep.into()) } else { Ok(()) }
    }

    pub fn leave(&mut self) {
        self.depth -= 1;
    }

    /// Enters an array and gives its length; the caller reads that many elements and then calls [`Reader::leave`].
    pub fn array(&mut self) -> Result<usize> {
        let length = match self.marker()? {
            Marker::FixArray(length) => usize::from(length),
            Marker::Array16 => self.length(2)?,
            Marker::Array32 => self.length(4)?,
            other => return Err(wrong_type("an array", other)),
        };
        self.enter(length)?;
        Ok(length)
    }

    /// Enters a map and gives the number of its entries, as [`Reader::array`] does.
    pub fn map(&mut self) -> Result<usize> {
        let length = match self.marker()? {
            Marker::FixMap(length) => usize::from(length),
            Marker::Map16 => self.length(2)?,
            Marker::Map32 => self.length(4)?,
            other => return Err(wrong_type("a map", other)),
        };
        self.enter(length.saturating_mul(2))?;
        Ok(length)
    }

    /// An array of values of one type.
    pub fn list<T>(&mut self, mut element: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let length = self.array()?;
        let mut list = Vec::with_capacity(length);
        for index in 0..length {
            list.push(element(self).map_err(|error| error.at_index(index))?);
        }
        self.leave();
        Ok(list)
    }

    /// A map with string keys; `entry` reads the value of each key that it knows and calls [`Reader::skip`] for others.
    pub fn entries(&mut self, mut entry: impl FnMut(&mut Self, &'a str) -> Result<()>) -> Result<()> {
        for _ in 0..self.map()? {
            let key = self.text()?;
            entry(self, key).map_err(|error| error.at(key))?;
        }
        self.leave();
        Ok(())
    }
}

pub(super) fn wrong_type(expected: &'static str, found: Marker) -> DecodeError {
    match found {
        Marker::Reserved => Kind::Reserved.into(),
        _ => Kind::WrongType { expected, found: family(found) }.into(),
    }
}
