//! Log-probs of the tokens of one output, as n-dimensional arrays on the wire and as flat rows here.

use std::ops::Range;

use serde::de::SeqAccess;

use crate::error::DecodeErrorKind as Kind;
use crate::fields::Fields;
use crate::source::Source;
use crate::wire::{Scalar, Wire, in_range, scalars, seed};
use crate::writer::Writer;

/// Log-probs of consecutive positions, row-major. Column 0 of a row is the sampled token, columns 1 to k are the top k
/// by rank; the sampled token may be among these again.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LogprobsLists {
    /// Columns of each row, k + 1.
    pub width: usize,
    /// `[positions * width]`.
    pub token_ids: Vec<u32>,
    /// `[positions * width]`; may hold -inf and NaN.
    pub logprobs: Vec<f32>,
    /// `[positions]`: rank of the sampled token, 1 is the most probable.
    pub sampled_ranks: Vec<u32>,
    /// Cumulative token counts of a batch; nil for one request.
    pub cumulative: Option<Vec<u64>>,
}

/// The log-probs of one position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogprobsRow<'a> {
    /// `[k + 1]`.
    pub token_ids: &'a [u32],
    /// `[k + 1]`.
    pub logprobs: &'a [f32],
    /// Rank of the sampled token.
    pub sampled_rank: u32,
}

impl LogprobsLists {
    /// Number of rows.
    pub fn positions(&self) -> usize {
        self.sampled_ranks.len()
    }

    /// The rows, in generation order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = LogprobsRow<'_>> {
        let rows = self.token_ids.chunks_exact(self.width.max(1)).zip(self.logprobs.chunks_exact(self.width.max(1)));
        let rows = rows.zip(&self.sampled_ranks);
        rows.map(|((token_ids, logprobs), rank)| LogprobsRow { token_ids, logprobs, sampled_rank: *rank })
    }

    /// Appends the rows of `other`, which comes behind these.
    pub fn extend(&mut self, other: &Self) {
        if self.sampled_ranks.is_empty() {
            self.clone_from(other);
        } else if self.width == other.width {
            self.token_ids.extend_from_slice(&other.token_ids);
            self.logprobs.extend_from_slice(&other.logprobs);
            self.sampled_ranks.extend_from_slice(&other.sampled_ranks);
        }
    }

    pub(crate) fn write(&self, writer: &mut Writer) {
        let positions = self.positions();
        let integers = |values: &[u32]| values.iter().flat_map(|value| i64::from(*value).to_le_bytes()).collect();
        let narrow = self.token_ids.iter().chain(&self.sampled_ranks).all(|value| i32::try_from(*value).is_ok());
        let integers = |values: &[u32]| -> Vec<u8> {
            if narrow { values.iter().flat_map(|value| value.to_le_bytes()).collect() } else { integers(values) }
        };
        let dtype = if narrow { "<i4" } else { "<i8" };
        let floats: Vec<u8> = self.logprobs.iter().flat_map(|value| value.to_le_bytes()).collect();
        writer.array(4);
        write_array(writer, dtype, &[positions, self.width], &integers(&self.token_ids));
        write_array(writer, "<f4", &[positions, self.width], &floats);
        write_array(writer, dtype, &[positions], &integers(&self.sampled_ranks));
        writer.value(&self.cumulative);
    }
}

impl Wire for LogprobsLists {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let token_ids: Array = fields.required("token_ids")?;
        let logprobs: Array = fields.required("logprobs")?;
        let ranks: Array = fields.required("sampled_ranks")?;
        let mut cumulative = None;
        fields.defaulted("cu_num_generated_tokens", &mut cumulative)?;
        fields.close()?;
        let Shape { dimensions, sizes: [positions, width] } = token_ids.shape;
        if dimensions != 2 || width == 0 {
            return Err(source.refuse(invalid("token_ids must have the shape [positions, k + 1]")));
        }
        if logprobs.shape != token_ids.shape || ranks.shape != (Shape { dimensions: 1, sizes: [positions, 0] }) {
            let words = "log-probs must have the shape of token_ids, ranks one entry for each position";
            return Err(source.refuse(invalid(words)));
        }
        Ok(Self {
            width,
            token_ids: token_ids.integers(source).map_err(|kind| source.refuse_at("token_ids", kind))?,
            logprobs: logprobs.floats(source).map_err(|kind| source.refuse_at("logprobs", kind))?,
            sampled_ranks: ranks.integers(source).map_err(|kind| source.refuse_at("sampled_ranks", kind))?,
            cumulative,
        })
    }
}

fn write_array(writer: &mut Writer, dtype: &str, shape: &[usize], data: &[u8]) {
    writer.array(3);
    writer.value(dtype);
    writer.value(shape);
    writer.array_data(data);
}

#[derive(Clone, Copy, PartialEq)]
enum Dtype {
    Int32,
    Int64,
    Float32,
}

scalars! {
    Dtype, "a string":
        Scalar::Text("<i4") => Self::Int32,
        Scalar::Text("<i8") => Self::Int64,
        Scalar::Text("<f4") => Self::Float32,
        Scalar::Text(other) => Err(invalid(&format!("dtype must be <i4, <i8 or <f4, got {other:?}")))?;
    Data, "raw array bytes or the index of a buffer":
        Scalar::ArrayData(range) => Self::Inline(range),
        Scalar::Integer(index) => Self::Buffer(in_range(index, "a buffer index")?);
}

/// Sizes of the dimensions: one or two, the second 0 where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    dimensions: usize,
    sizes: [usize; 2],
}

impl Wire for Shape {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(mut access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut shape = Self { dimensions: 0, sizes: [0; 2] };
        while let Some(size) = access.next_element_seed(seed::<u64>(source))? {
            let size = usize::try_from(size).map_err(|_| source.refuse(Kind::OutOfRange("an array dimension")))?;
            if let Some(slot) = shape.sizes.get_mut(shape.dimensions) {
                *slot = size;
            }
            shape.dimensions += 1;
        }
        if (1..=2).contains(&shape.dimensions) {
            Ok(shape)
        } else {
            Err(source.refuse(invalid("must have one or two dimensions")))
        }
    }
}

impl Shape {
    /// Bytes of an array of this shape; `None` where they cannot be counted.
    fn bytes(self, item: usize) -> Option<usize> {
        self.sizes.iter().take(self.dimensions).try_fold(item, |bytes, size| bytes.checked_mul(*size))
    }
}

/// Where the data of an array is.
enum Data {
    Inline(Range<usize>),
    /// 1-based index of an auxiliary buffer.
    Buffer(u64),
}

fn invalid(words: &str) -> Kind {
    Kind::InvalidArray(words.to_owned())
}

/// An n-dimensional array whose data has the size that dtype and shape promise.
struct Array {
    dtype: Dtype,
    shape: Shape,
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
        let item = if array.dtype == Dtype::Int64 { 8 } else { 4 };
        if array.shape.bytes(item) == Some(found) {
            return Ok(array);
        }
        Err(source.refuse(invalid(&format!("{found} bytes of data do not fill {:?}", array.shape))))
    }
}

impl Array {
    fn bytes<'a>(&self, source: &Source<'a>) -> Result<&'a [u8], Kind> {
        match &self.data {
            Data::Inline(range) => Ok(source.slice(range.clone())),
            Data::Buffer(index) => source.buffer(*index),
        }
    }

    fn integers(&self, source: &Source<'_>) -> Result<Vec<u32>, Kind> {
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
            Dtype::Float32 => return Err(invalid("dtype must be <i4 or <i8, got <f4")),
        };
        integers.ok_or(out_of_range)
    }

    fn floats(&self, source: &Source<'_>) -> Result<Vec<f32>, Kind> {
        if self.dtype != Dtype::Float32 {
            return Err(invalid("dtype must be <f4"));
        }
        Ok(self.bytes(source)?.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect())
    }
}
