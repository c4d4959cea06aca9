//! Weight-version spans: which weights sampled which output tokens. `python/rollspan/spans.py` is their definition.

use std::sync::Arc;

use serde::Serialize;

/// Output tokens `start` to `end - 1` were sampled by the weights called `version`; `None`: the engine did not say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VersionSpan {
    /// Label.
    pub version: Option<Arc<str>>,
    /// First token, counted from the start of the output.
    pub start: usize,
    /// Behind the last token.
    pub end: usize,
}

/// Output tokens `start` to `end - 1` were sampled by the weights of `commit`; `None`: the engine did not say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CommitSpan {
    /// Commit number.
    pub commit: Option<u64>,
    /// First token, counted from the start of the output.
    pub start: usize,
    /// Behind the last token.
    pub end: usize,
}

/// The spans of some output tokens. A list covers its tokens exactly once, in order, and adjacent spans differ. `None`: there
/// are tokens, and the engine never said anything about any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spans {
    /// By label.
    pub versions: Option<Vec<VersionSpan>>,
    /// By commit number.
    pub commits: Option<Vec<CommitSpan>>,
}

/// Run-length list of the stamps of consecutive tokens: each run's stamp and where it ends.
#[derive(Debug, Clone)]
struct Runs<T> {
    runs: Vec<(Option<T>, usize)>,
    stamped: bool,
}

impl<T> Default for Runs<T> {
    fn default() -> Self {
        Self { runs: Vec::new(), stamped: false }
    }
}

impl<T: Clone> Runs<T> {
    fn extend(&mut self, same: impl FnOnce(&Option<T>) -> bool, stamp: impl FnOnce() -> Option<T>, end: usize) {
        match self.runs.last_mut() {
            Some((last, last_end)) if same(last) => *last_end = end,
            _ => {
                let stamp = stamp();
                self.stamped |= stamp.is_some();
                self.runs.push((stamp, end));
            }
        }
    }

    /// Runs cut to tokens `start` to `end - 1`, walking back from the newest one: O(runs from `start` on).
    fn between<S>(&self, start: usize, end: usize, span: impl Fn(Option<T>, usize, usize) -> S) -> Option<Vec<S>> {
        if end <= start {
            return Some(Vec::new());
        }
        if !self.stamped {
            return None;
        }
        let mut found = Vec::new();
        for (index, (stamp, run_end)) in self.runs.iter().enumerate().rev() {
            let run_start = index.checked_sub(1).map_or(0, |before| self.runs[before].1);
            if *run_end <= start {
                break;
            }
            if run_start < end {
                found.push(span(stamp.clone(), run_start.max(start), end.min(*run_end)));
            }
        }
        found.reverse();
        Some(found)
    }
}

/// Collects the stamps of one output sequence: O(1) for each engine output, O(spans) memory.
#[derive(Debug, Clone, Default)]
pub struct SpanBuilder {
    versions: Runs<Arc<str>>,
    commits: Runs<u64>,
    tokens: usize,
}

impl SpanBuilder {
    /// Number of tokens so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The next `tokens` output tokens were sampled under this label and commit number. No tokens open no span.
    pub fn push(&mut self, version: Option<&str>, commit: Option<u64>, tokens: usize) {
        if tokens == 0 {
            return;
        }
        self.tokens += tokens;
        self.versions.extend(|last| last.as_deref() == version, || version.map(Arc::from), self.tokens);
        self.commits.extend(|last| *last == commit, || commit, self.tokens);
    }

    /// Spans of the first `total` tokens, for an output trimmed to that length.
    pub fn finish(&self, total: usize) -> Spans {
        self.between(0, total)
    }

    /// Spans of tokens `start` to `end - 1`, as far as there are any: one chunk of a stream.
    pub fn between(&self, start: usize, end: usize) -> Spans {
        let end = end.min(self.tokens);
        Spans {
            versions: self.versions.between(start, end, |version, start, end| VersionSpan { version, start, end }),
            commits: self.commits.between(start, end, |commit, start, end| CommitSpan { commit, start, end }),
        }
    }
}
