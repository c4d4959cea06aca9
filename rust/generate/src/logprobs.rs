//! Log-probs as `objects`: one object per token, both spellings of the token id, the sampled token first.

use rollspan_protocol::{LogprobsLists, LogprobsRow};
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

/// What JSON shows for log-probs that it cannot hold; vLLM's rule.
const MINIMUM_LOGPROB: f64 = -9999.0;

/// `{"content": [...]}` of some positions.
pub(crate) struct Objects<'a> {
    /// Rows of the positions; `None` for no position at all.
    pub lists: Option<&'a LogprobsLists>,
    /// Candidates besides the sampled token; `None` for all that are there.
    pub top: Option<usize>,
}

struct Content<'a>(&'a Objects<'a>);

/// One position and how many of its candidates are wanted, as above.
pub(crate) struct Position<'a> {
    pub row: LogprobsRow<'a>,
    pub top: Option<usize>,
}

struct Candidates<'a>(&'a Position<'a>);

/// One token of a position.
pub(crate) struct Candidate {
    pub token_id: u32,
    /// Finite.
    pub logprob: f64,
    pub rank: u32,
}

impl Serialize for Objects<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry("content", &Content(self))?;
        map.end()
    }
}

impl Serialize for Content<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rows = self.0.lists.map(LogprobsLists::rows);
        let mut sequence = serializer.serialize_seq(rows.as_ref().map(ExactSizeIterator::len))?;
        for row in rows.into_iter().flatten() {
            sequence.serialize_element(&Position { row, top: self.0.top })?;
        }
        sequence.end()
    }
}

impl Candidate {
    fn new(token_id: u32, logprob: f32, rank: u32) -> Self {
        let logprob = if logprob.is_finite() { logprob.into() } else { MINIMUM_LOGPROB };
        Self { token_id, logprob, rank }
    }

    fn fields<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        map.serialize_entry("token", &format_args!("token_id:{}", self.token_id))?;
        map.serialize_entry("token_id", &self.token_id)?;
        map.serialize_entry("logprob", &self.logprob)?;
        map.serialize_entry("rank", &self.rank)
    }
}

impl Serialize for Candidate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(4))?;
        self.fields(&mut map)?;
        map.end()
    }
}

impl Position<'_> {
    /// The sampled token, if the row has one, as rows of a decoded message do.
    fn sampled(&self) -> Option<Candidate> {
        let (token_id, logprob) = self.row.token_ids.first().zip(self.row.logprobs.first())?;
        Some(Candidate::new(*token_id, *logprob, self.row.sampled_rank))
    }

    /// The sampled token, then the others.
    pub fn candidates(&self) -> impl Iterator<Item = Candidate> {
        self.sampled().into_iter().chain(self.others())
    }

    /// The most probable tokens by rank, without the sampled one, which is among them under its own rank.
    fn others(&self) -> impl Iterator<Item = Candidate> {
        let sampled = self.row.token_ids.first();
        let columns = self.row.token_ids.iter().zip(self.row.logprobs).zip(0_u32..).skip(1);
        let columns = columns.take(self.top.unwrap_or(usize::MAX));
        columns
            .filter(move |((token_id, _), _)| Some(*token_id) != sampled)
            .map(|((token_id, logprob), rank)| Candidate::new(*token_id, *logprob, rank))
    }
}

impl Serialize for Position<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(5))?;
        if let Some(sampled) = self.sampled() {
            sampled.fields(&mut map)?;
        }
        map.serialize_entry("top_logprobs", &Candidates(self))?;
        map.end()
    }
}

impl Serialize for Candidates<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.candidates())
    }
}
