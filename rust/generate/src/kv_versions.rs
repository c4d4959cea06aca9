//! KV versions: which weights computed the keys and values that output tokens attended to. `KvVersionBuilder` of
//! `python/rollspan/spans.py` is their definition, with their laws.

use std::sync::Arc;

use rollspan_protocol::StampSpan;
use serde::Serialize;
use thiserror::Error;

/// Positions `start` to `end - 1` belong to these weights; `None`: nobody said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WeightSpan {
    /// Label.
    pub version: Option<Arc<str>>,
    /// Commit number.
    pub commit: Option<u64>,
    /// First position.
    pub start: usize,
    /// Behind the last position.
    pub end: usize,
}

/// What was asked for; null where the engine did not say it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Told<T>(pub Option<T>);

/// What output tokens `start` to `end - 1` attended to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KvVersionSpan {
    /// First token, counted from the start of the output.
    pub start: usize,
    /// Behind the last token.
    pub end: usize,
    /// Who computed the keys and values of all positions, from 0 on, that token `end - 1` attended to.
    pub kv: Vec<WeightSpan>,
}

/// KV spans that do not describe all positions before a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum KvSpansError {
    /// Another position would come next.
    #[error("KV spans name positions {start} to {end} where {next} comes next")]
    Apart {
        /// First position of the span.
        start: u32,
        /// Behind its last position.
        end: u32,
        /// What would come next.
        next: usize,
    },
    /// There are others than those before the token.
    #[error("KV spans cover {found} positions, but {length} come before the token")]
    Length {
        /// How many positions they cover.
        found: usize,
        /// How many come before the token.
        length: usize,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp {
    version: Option<Arc<str>>,
    commit: Option<u64>,
}

/// Weights, and behind which position they end.
#[derive(Debug, Clone)]
struct Run {
    stamp: Stamp,
    end: usize,
}

/// Output tokens from `start` on, under one stamp.
#[derive(Debug, Clone)]
struct Segment {
    start: usize,
    stamp: Stamp,
    /// The KV before the first of them; `None`: that of the tokens before, and the position that each adds.
    announced: Option<Vec<Run>>,
}

/// Collects which weights computed the KV of one sequence: O(1) for each engine output, O(spans) memory.
#[derive(Debug, Clone)]
pub struct KvVersionBuilder {
    prompt_length: usize,
    segments: Vec<Segment>,
    tokens: usize,
    said: bool,
}

impl From<StampSpan> for WeightSpan {
    fn from(span: StampSpan) -> Self {
        Self {
            version: Some(span.weight_version),
            commit: Some(span.weight_commit),
            start: span.start as usize,
            end: span.end as usize,
        }
    }
}

impl KvVersionBuilder {
    /// For a sequence behind so many tokens of a prompt.
    pub fn new(prompt_length: usize) -> Self {
        Self { prompt_length, segments: Vec::new(), tokens: 0, said: false }
    }

    /// The next `tokens` output tokens were sampled under this stamp; `kv_spans` came with them. No tokens say nothing.
    ///
    /// # Errors
    /// The KV spans do not describe all positions before the first of the tokens.
    pub fn push(
        &mut self,
        version: Option<&str>,
        commit: Option<u64>,
        tokens: usize,
        kv_spans: Option<Vec<StampSpan>>,
    ) -> Result<(), KvSpansError> {
        if tokens == 0 {
            return Ok(());
        }
        let start = self.tokens;
        let same = |segment: &Segment| segment.stamp.version.as_deref() == version && segment.stamp.commit == commit;
        let announced = match (kv_spans, self.segments.last()) {
            (Some(spans), _) => {
                let runs = runs(spans, self.prompt_length + start)?;
                self.said = true;
                Some(Some(runs))
            }
            (None, None) => {
                let nobody = Stamp { version: None, commit: None };
                Some(Some(vec![Run { stamp: nobody, end: self.prompt_length }]))
            }
            (None, Some(last)) if same(last) => None,
            (None, Some(_)) => Some(None),
        };
        if let Some(announced) = announced {
            let stamp = Stamp { version: version.map(Arc::from), commit };
            self.segments.push(Segment { start, stamp, announced });
        }
        self.tokens += tokens;
        Ok(())
    }

    /// Segments of the first `total` tokens, for an output trimmed to them; `None` when there are tokens and the engine has
    /// never said anything.
    pub fn finish(&self, total: usize) -> Option<Vec<KvVersionSpan>> {
        let total = total.min(self.tokens);
        if total > 0 && !self.said {
            return None;
        }
        let mut found = Vec::new();
        let mut runs: Vec<Run> = Vec::new();
        let ends = self.segments.iter().skip(1).map(|segment| segment.start).chain([total]);
        for (segment, end) in self.segments.iter().zip(ends).take_while(|(segment, _)| segment.start < total) {
            let end = end.min(total);
            if let Some(announced) = &segment.announced {
                runs.clone_from(announced);
            }
            append(&mut runs, &segment.stamp, self.prompt_length + end - 1);
            found.push(KvVersionSpan { start: segment.start, end, kv: spans(&runs) });
        }
        Some(found)
    }
}

/// Announced spans as runs, equal neighbours merged.
fn runs(spans: Vec<StampSpan>, length: usize) -> Result<Vec<Run>, KvSpansError> {
    let mut runs = Vec::with_capacity(spans.len());
    let mut next = 0;
    for span in spans {
        let (start, end) = (span.start, span.end);
        if start as usize != next || end <= start {
            return Err(KvSpansError::Apart { start, end, next });
        }
        next = end as usize;
        append(&mut runs, &Stamp { version: Some(span.weight_version), commit: Some(span.weight_commit) }, next);
    }
    if next == length { Ok(runs) } else { Err(KvSpansError::Length { found: next, length }) }
}

/// Positions up to `end - 1` that have no weights yet get these.
fn append(runs: &mut Vec<Run>, stamp: &Stamp, end: usize) {
    match runs.last_mut() {
        Some(last) if last.end >= end => {}
        Some(last) if last.stamp == *stamp => last.end = end,
        _ => runs.push(Run { stamp: stamp.clone(), end }),
    }
}

fn spans(runs: &[Run]) -> Vec<WeightSpan> {
    let starts = [0].into_iter().chain(runs.iter().map(|run| run.end));
    let span = |(run, start): (&Run, usize)| {
        let Stamp { version, commit } = run.stamp.clone();
        WeightSpan { version, commit, start, end: run.end }
    };
    runs.iter().zip(starts).map(span).collect()
}
