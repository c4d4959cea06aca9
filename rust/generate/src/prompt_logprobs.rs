//! Log-probs of a prompt: null for its first token, then for each token an object of candidates by their ids, the token
//! itself first.

use rollspan_protocol::{LogprobsLists, LogprobsRow};
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

use crate::logprobs::{Candidate, Position};

/// `[null, {"<id>": {...}}, ...]`.
pub(crate) struct PromptLogprobs<'a> {
    /// Rows of the tokens after the first.
    pub lists: &'a LogprobsLists,
    /// Candidates besides the token itself; `None` for all that are there.
    pub top: Option<usize>,
}

struct PromptPosition<'a>(Position<'a>);

struct Entry(Candidate);

impl Serialize for PromptLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rows = self.lists.rows();
        let mut sequence = serializer.serialize_seq(Some(1 + rows.len()))?;
        sequence.serialize_element(&())?;
        for row in rows {
            sequence.serialize_element(&PromptPosition::new(row, self.top))?;
        }
        sequence.end()
    }
}

impl<'a> PromptPosition<'a> {
    fn new(row: LogprobsRow<'a>, top: Option<usize>) -> Self {
        Self(Position { row, top })
    }
}

impl Serialize for PromptPosition<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for candidate in self.0.candidates() {
            let key = candidate.token_id;
            map.serialize_entry(&key, &Entry(candidate))?;
        }
        map.end()
    }
}

impl Serialize for Entry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("logprob", &self.0.logprob)?;
        map.serialize_entry("rank", &self.0.rank)?;
        map.serialize_entry("decoded_token", &format_args!("token_id:{}", self.0.token_id))?;
        map.end()
    }
}
