//! Values of any type: passed over, kept as their bytes, or read as JSON. Checked as strictly as the values that are read.

use rmp::Marker;
use serde_json::Value;

use crate::error::DecodeErrorKind as Kind;
use crate::raw::RawValue;
use crate::reader::{MAX_DEPTH, Reader, Result, family, wrong_type};

/// Length of what one value needs behind its marker: bytes to pass over and nested values to come.
struct Extent {
    bytes: usize,
    values: usize,
    container: bool,
}

impl Reader<'_> {
    fn extent(&mut self, marker: Marker) -> Result<Extent> {
        let flat = |bytes| Extent { bytes, values: 0, container: false };
        let container = |values| Extent { bytes: 0, values, container: true };
        Ok(match marker {
            Marker::Null | Marker::True | Marker::False | Marker::FixPos(_) | Marker::FixNeg(_) => flat(0),
            Marker::U8 | Marker::I8 => flat(1),
            Marker::U16 | Marker::I16 => flat(2),
            Marker::U32 | Marker::I32 | Marker::F32 => flat(4),
            Marker::U64 | Marker::I64 | Marker::F64 => flat(8),
            Marker::Bin8 => flat(self.length(1)?),
            Marker::Bin16 => flat(self.length(2)?),
            Marker::Bin32 => flat(self.length(4)?),
            Marker::FixArray(length) => container(usize::from(length)),
            Marker::Array16 => container(self.length(2)?),
            Marker::Array32 => container(self.length(4)?),
            Marker::FixMap(length) => container(2 * usize::from(length)),
            Marker::Map16 => container(2 * self.length(2)?),
            Marker::Map32 => container(2 * self.length(4)?),
            other => return Err(wrong_type("a value", other)),
        })
    }

    /// Passes over one value of any type, checking it as strictly as the values that are read.
    pub fn skip(&mut self) -> Result<()> {
        // Values still to come on each open level: a stack on the heap, as the input decides how deep it gets.
        let mut open = vec![1_usize];
        while let Some(left) = open.last_mut() {
            if *left == 0 {
                open.pop();
                continue;
            }
            *left -= 1;
            match self.peek()? {
                Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => drop(self.text()?),
                marker if family(marker) == "an extension type" => drop(self.array_data()?),
                marker => {
                    self.position += 1;
                    let extent = self.extent(marker)?;
                    self.take(extent.bytes)?;
                    if extent.container {
                        // `open` holds one level for the value itself.
                        if self.depth + open.len() > MAX_DEPTH {
                            return Err(Kind::TooDeep.into());
                        }
                        open.push(extent.values);
                    }
                }
            }
        }
        Ok(())
    }

    /// One value of any type, kept as its bytes.
    pub fn raw(&mut self) -> Result<RawValue> {
        let start = self.position;
        self.skip()?;
        Ok(RawValue::new(&self.bytes[start..self.position]))
    }

    /// As [`Reader::raw`], for a field that must be an array.
    pub fn raw_array(&mut self) -> Result<RawValue> {
        match self.peek()? {
            Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => self.raw(),
            other => Err(wrong_type("an array", other)),
        }
    }

    /// As [`Reader::raw`], for a field that must be a map.
    pub fn raw_map(&mut self) -> Result<RawValue> {
        match self.peek()? {
            Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => self.raw(),
            other => Err(wrong_type("a map", other)),
        }
    }

    /// One value of any type that JSON has; floats that it has not become null.
    pub fn json(&mut self) -> Result<Value> {
        Ok(match self.peek()? {
            Marker::Null => {
                self.position += 1;
                Value::Null
            }
            Marker::True | Marker::False => self.boolean()?.into(),
            Marker::F32 | Marker::F64 => self.f64()?.into(),
            Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => self.string()?.into(),
            Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => self.list(Self::json)?.into(),
            Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => {
                let mut object = serde_json::Map::new();
                self.entries(|reader, key| {
                    object.insert(key.to_owned(), reader.json()?);
                    Ok(())
                })?;
                object.into()
            }
            marker if family(marker) == "an extension type" => {
                self.array_data()?;
                return Err(wrong_type("a value that JSON has", marker));
            }
            marker => {
                self.position += 1;
                let value = self.integer_after(marker, "a value that JSON has")?;
                match (u64::try_from(value), i64::try_from(value)) {
                    (Ok(value), _) => value.into(),
                    (_, Ok(value)) => value.into(),
                    _ => Value::Null,
                }
            }
        })
    }
}
