//! Log-probs of the tokens of one output, as n-dimensional arrays on the wire and as flat rows here.

use serde::de::SeqAccess;

use crate::array::{Array, invalid, write_array};
use crate::fields::Fields;
use crate::source::Source;
use crate::untyped::Skipped;
use crate::wire::Wire;
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
        writer.array(4);
        self.write_arrays(writer, ["<i4", "<i8", "<f4"]);
        writer.value(&self.cumulative);
    }

    /// As vLLM's `LogprobsTensors`, the form for prompts.
    pub(crate) fn write_tensors(&self, writer: &mut Writer) {
        writer.array(5);
        self.write_arrays(writer, ["int32", "int64", "float32"]);
        writer.nil();
        writer.nil();
    }

    fn write_arrays(&self, writer: &mut Writer, [narrow, wide, float]: [&str; 3]) {
        let positions = self.positions();
        let fits = self.token_ids.iter().chain(&self.sampled_ranks).all(|value| i32::try_from(*value).is_ok());
        let integers = |values: &[u32]| -> Vec<u8> {
            if fits {
                values.iter().flat_map(|value| value.to_le_bytes()).collect()
            } else {
                values.iter().flat_map(|value| i64::from(*value).to_le_bytes()).collect()
            }
        };
        let integer = if fits { narrow } else { wide };
        let floats: Vec<u8> = self.logprobs.iter().flat_map(|value| value.to_le_bytes()).collect();
        write_array(writer, integer, &[positions, self.width], &integers(&self.token_ids));
        write_array(writer, float, &[positions, self.width], &floats);
        write_array(writer, integer, &[positions], &integers(&self.sampled_ranks));
    }

    fn read_arrays<'de, A: SeqAccess<'de>>(
        fields: &mut Fields<'_, '_, A>,
        source: &Source<'_>,
    ) -> Result<Self, A::Error> {
        let token_ids: Array = fields.required("token_ids")?;
        let logprobs: Array = fields.required("logprobs")?;
        let ranks: Array = fields.required("sampled_ranks")?;
        let (positions, width) = match token_ids.shape.sizes() {
            &[positions, width] if width > 0 => (positions, width),
            _ => return Err(source.refuse(invalid("token_ids must have the shape [positions, k + 1]"))),
        };
        if logprobs.shape != token_ids.shape || ranks.shape.sizes() != [positions] {
            let words = "log-probs must have the shape of token_ids, ranks one entry for each position";
            return Err(source.refuse(invalid(words)));
        }
        Ok(Self {
            width,
            token_ids: token_ids.integers(source).map_err(|kind| source.refuse_at("token_ids", kind))?,
            logprobs: logprobs.floats(source).map_err(|kind| source.refuse_at("logprobs", kind))?,
            sampled_ranks: ranks.integers(source).map_err(|kind| source.refuse_at("sampled_ranks", kind))?,
            cumulative: None,
        })
    }
}

impl Wire for LogprobsLists {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let mut lists = Self::read_arrays(&mut fields, source)?;
        fields.defaulted("cu_num_generated_tokens", &mut lists.cumulative)?;
        fields.close()?;
        Ok(lists)
    }
}

/// The same as vLLM's `LogprobsTensors`, with cumulative counts in two forms behind them.
pub(crate) struct Tensors(pub LogprobsLists);

impl Wire for Tensors {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut fields = Fields::new(access, source);
        let lists = LogprobsLists::read_arrays(&mut fields, source)?;
        fields.defaulted("cu_num_generated_tokens", &mut Skipped)?;
        fields.defaulted("cu_num_generated_tokens_tensor", &mut Skipped)?;
        fields.close()?;
        Ok(Self(lists))
    }
}
