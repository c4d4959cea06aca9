//! Log-probs of the tokens of one output, as n-dimensional arrays on the wire and as flat rows here.

use crate::error::{DecodeError, DecodeErrorKind as Kind};
use crate::fields::Fields;
use crate::reader::{Reader, Result};
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

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut fields = Fields::open(reader)?;
        let token_ids = fields.required(reader, "token_ids", Array::read)?;
        let logprobs = fields.required(reader, "logprobs", Array::read)?;
        let ranks = fields.required(reader, "sampled_ranks", Array::read)?;
        let cumulative = fields.optional(reader, "cu_num_generated_tokens", |reader| reader.list(Reader::u64))?;
        fields.close(reader)?;
        let Shape { dimensions, sizes: [positions, width] } = token_ids.shape;
        if dimensions != 2 || width == 0 {
            return Err(invalid("token_ids must have the shape [positions, k + 1]"));
        }
        if logprobs.shape != token_ids.shape || ranks.shape != (Shape { dimensions: 1, sizes: [positions, 0] }) {
            return Err(invalid("log-probs must have the shape of token_ids, ranks one entry for each position"));
        }
        Ok(Self {
            width,
            token_ids: token_ids.integers().map_err(|error| error.at("token_ids"))?,
            logprobs: logprobs.floats().map_err(|error| error.at("logprobs"))?,
            sampled_ranks: ranks.integers().map_err(|error| error.at("sampled_ranks"))?,
            cumulative,
        })
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
        writer.optional(self.cumulative.as_deref(), |writer, values| {
            writer.array(values.len());
            for value in values {
                writer.u64(*value);
            }
        });
    }
}

fn write_array(writer: &mut Writer, dtype: &str, shape: &[usize], data: &[u8]) {
    writer.array(3);
    writer.text(dtype);
    writer.array(shape.len());
    for size in shape {
        writer.u64(*size as u64);
    }
    writer.array_data(data);
}

#[derive(Clone, Copy, PartialEq)]
enum Dtype {
    Int32,
    Int64,
    Float32,
}

/// An n-dimensional array whose data has the size that dtype and shape promise.
struct Array<'a> {
    dtype: Dtype,
    shape: Shape,
    data: &'a [u8],
}

/// Sizes of the dimensions: one or two, the second 0 where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    dimensions: usize,
    sizes: [usize; 2],
}

impl Shape {
    fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut shape = Self { dimensions: reader.array()?, sizes: [0; 2] };
        if !(1..=2).contains(&shape.dimensions) {
            return Err(invalid("must have one or two dimensions"));
        }
        for size in shape.sizes.iter_mut().take(shape.dimensions) {
            *size = usize::try_from(reader.u64()?).map_err(|_| Kind::OutOfRange("an array dimension"))?;
        }
        reader.leave();
        Ok(shape)
    }

    /// Bytes of an array of this shape; `None` where they cannot be counted.
    fn bytes(self, item: usize) -> Option<usize> {
        self.sizes.iter().take(self.dimensions).try_fold(item, |bytes, size| bytes.checked_mul(*size))
    }
}

fn invalid(words: &str) -> DecodeError {
    Kind::InvalidArray(words.to_owned()).into()
}

impl<'a> Array<'a> {
    fn read(reader: &mut Reader<'a>) -> Result<Self> {
        let mut fields = Fields::open(reader)?;
        let dtype = fields.required(reader, "dtype", |reader| match reader.text()? {
            "<i4" => Ok(Dtype::Int32),
            "<i8" => Ok(Dtype::Int64),
            "<f4" => Ok(Dtype::Float32),
            other => Err(invalid(&format!("dtype must be <i4, <i8 or <f4, got {other:?}"))),
        })?;
        let shape = fields.required(reader, "shape", Shape::read)?;
        let data = fields.required(reader, "data", Reader::array_data)?;
        fields.close(reader)?;
        let item = if dtype == Dtype::Int64 { 8 } else { 4 };
        if shape.bytes(item) != Some(data.len()) {
            return Err(invalid(&format!("{} bytes of data do not fill {shape:?}", data.len())));
        }
        Ok(Self { dtype, shape, data })
    }

    fn integers(&self) -> Result<Vec<u32>> {
        let out_of_range = || Kind::OutOfRange("an unsigned 32-bit integer").into();
        match self.dtype {
            Dtype::Int32 => {
                let (values, _) = self.data.as_chunks::<4>();
                values
                    .iter()
                    .map(|value| u32::try_from(i32::from_le_bytes(*value)).map_err(|_| out_of_range()))
                    .collect()
            }
            Dtype::Int64 => {
                let (values, _) = self.data.as_chunks::<8>();
                values
                    .iter()
                    .map(|value| u32::try_from(i64::from_le_bytes(*value)).map_err(|_| out_of_range()))
                    .collect()
            }
            Dtype::Float32 => Err(invalid("dtype must be <i4 or <i8, got <f4")),
        }
    }

    fn floats(&self) -> Result<Vec<f32>> {
        if self.dtype != Dtype::Float32 {
            return Err(invalid("dtype must be <f4"));
        }
        let (values, _) = self.data.as_chunks::<4>();
        Ok(values.iter().map(|value| f32::from_le_bytes(*value)).collect())
    }
}
