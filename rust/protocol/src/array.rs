//! N-dimensional arrays on the wire: `[dtype, shape, data]`.

use std::ops::Range;

use serde::de::SeqAccess;

use crate::error::DecodeErrorKind as Kind;
use crate::fields::Fields;
use crate::source::Source;
use crate::wire::{Scalar, Wire, in_range, scalars, seed};
use crate::writer::Writer;

/// Most dimensions of an array.
const DIMENSIONS: usize = 3;

/// Type of an array's items, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dtype {
    Uint8,
    Int16,
    Int32,
    Int64,
    Float32,
}

scalars! {
    // Arrays have numpy's names, tensors torch's.
    Dtype, "a string":
        Scalar::Text("|u1" | "uint8") => Self::Uint8,
        Scalar::Text("<i2" | "int16") => Self::Int16,
        Scalar::Text("<i4" | "int32") => Self::Int32,
        Scalar::Text("<i8" | "int64") => Self::Int64,
        Scalar::Text("<f4" | "float32") => Self::Float32,
        Scalar::Text(other) => Err(invalid(&format!("dtype must be one of |u1, <i2, <i4, <i8 and <f4, got {other:?}")))?;
    Data, "raw array bytes or the index of a buffer":
        Scalar::ArrayData(range) => Self::Inline(range),
        Scalar::Integer(index) => Self::Buffer(in_range(index, "a buffer index")?);
}

impl Dtype {
    /// Size of an item.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Uint8 => 1,
            Self::Int16 => 2,
            Self::Int32 | Self::Float32 => 4,
            Self::Int64 => 8,
        }
    }

    /// The name in numpy.
    pub const fn numpy(self) -> &'static str {
        match self {
            Self::Uint8 => "|u1",
            Self::Int16 => "<i2",
            Self::Int32 => "<i4",
            Self::Int64 => "<i8",
            Self::Float32 => "<f4",
        }
    }
}

/// Sizes of one to three dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    dimensions: usize,
    sizes: [usize; DIMENSIONS],
}

impl Shape {
    /// The sizes, outermost first.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes[..self.dimensions.min(DIMENSIONS)]
    }

    /// Bytes of an array of this shape; `None` where they cannot be counted.
    fn bytes(self, item: usize) -> Option<usize> {
        self.sizes().iter().try_fold(item, |bytes, size| bytes.checked_mul(*size))
    }
}

impl Wire for Shape {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(mut access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut shape = Self { dimensions: 0, sizes: [0; DIMENSIONS] };
        while let Some(size) = access.next_element_seed(seed::<u64>(source))? {
            let size = usize::try_from(size).map_err(|_| source.refuse(Kind::OutOfRange("an array dimension")))?;
            if let Some(slot) = shape.sizes.get_mut(shape.dimensions) {
                *slot = size;
            }
            shape.dimensions += 1;
        }
        if (1..=DIMENSIONS).contains(&shape.dimensions) {
            Ok(shape)
        } else {
            Err(source.refuse(invalid("must have one to three dimensions")))
        }
    }
}

/// Where the data of an array is.
enum Data {
    Inline(Range<usize>),
    /// 1-based index of an auxiliary buffer.
    Buffer(u64),
}

pub(crate) fn invalid(words: &str) -> Kind {
    Kind::InvalidArray(words.to_owned())
}

/// An n-dimensional array whose data has the size that dtype and shape promise.
pub(crate) struct Array {
    pub dtype: Dtype,
    pub shape: Shape,
    data: Data,
}

impl Wire for Array {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let array =
            Self { dtype: fields.required("dtype")?, shape: fields.required("shape")?, data: fields.required("data")? };
        fields.close()?;
        let found = array.bytes(source).map_err(|kind| source.refuse_at("data", kind))?.len();
        if array.shape.bytes(array.dtype.bytes()) == Some(found) {
            return Ok(array);
        }
        Err(source.refuse(invalid(&format!("{found} bytes of data do not fill {:?}", array.shape))))
    }
}

impl Array {
    pub fn bytes<'a>(&self, source: &Source<'a>) -> Result<&'a [u8], Kind> {
        match &self.data {
            Data::Inline(range) => Ok(source.slice(range.clone())),
            Data::Buffer(index) => source.buffer(*index),
        }
    }

    /// The items, none of them negative.
    pub fn integers(&self, source: &Source<'_>) -> Result<Vec<u32>, Kind> {
        let out_of_range = Kind::OutOfRange("an unsigned 32-bit integer");
        let data = self.bytes(source)?;
        let integers: Option<Vec<u32>> = match self.dtype {
            Dtype::Int32 => {
                let values = data.as_chunks().0.iter().map(|value| i32::from_le_bytes(*value));
                values.map(|value| u32::try_from(value).ok()).collect()
            }
            Dtype::Int64 => {
                let values = data.as_chunks().0.iter().map(|value| i64::from_le_bytes(*value));
                values.map(|value| u32::try_from(value).ok()).collect()
            }
            other => return Err(invalid(&format!("dtype must be <i4 or <i8, got {}", other.numpy()))),
        };
        integers.ok_or(out_of_range)
    }

    /// The items.
    pub fn floats(&self, source: &Source<'_>) -> Result<Vec<f32>, Kind> {
        if self.dtype != Dtype::Float32 {
            return Err(invalid("dtype must be <f4"));
        }
        Ok(self.bytes(source)?.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect())
    }
}

/// Writes an array, `dtype` in whichever spelling.
pub(crate) fn write_array(writer: &mut Writer, dtype: &str, shape: &[usize], data: &[u8]) {
    writer.array(3);
    writer.value(dtype);
    writer.value(shape);
    writer.array_data(data);
}
