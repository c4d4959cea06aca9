//! What came back for one submission and waits for its taker.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use rollspan_protocol::{EngineCoreOutput, FinishReason};

use crate::delivery::Delivery;
use crate::error::RequestError;
use crate::observer::{Finished, Observer};

/// New tokens of one choice, all sampled by one set of weights; possibly those of several steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Delta {
    /// Index of the choice: the position of its request in the submission.
    pub choice: usize,
    /// Rank of the engine.
    pub engine_index: u64,
    /// Label of the weights that sampled the new tokens; `None` when the engine reports none.
    pub weight_version: Option<Arc<str>>,
    /// Their commit number.
    pub weight_commit: Option<u64>,
    /// The tokens, and the finish when it came with them.
    pub output: EngineCoreOutput,
}

impl Delta {
    fn is_empty(&self) -> bool {
        self.output.new_token_ids.is_empty()
    }

    /// Takes in what followed, when one delta can say both; otherwise gives it back.
    fn absorb(&mut self, next: Self) -> Option<Self> {
        let same_weights = self.weight_version == next.weight_version && self.weight_commit == next.weight_commit;
        if !(same_weights || self.is_empty() || next.is_empty()) {
            return Some(next);
        }
        // These spans are about the first token that follows them.
        if next.output.kv_spans.is_some() && !(self.is_empty() || next.is_empty()) {
            return Some(next);
        }
        match (&mut self.output.new_logprobs, &next.output.new_logprobs) {
            (Some(mine), Some(theirs)) if mine.width == theirs.width => mine.extend(theirs),
            (_, None) if next.is_empty() => {}
            (mine @ None, theirs) if self.output.new_token_ids.is_empty() => mine.clone_from(theirs),
            (None, None) => {}
            _ => return Some(next),
        }
        if !next.is_empty() {
            self.weight_version = next.weight_version;
            self.weight_commit = next.weight_commit;
        }
        let behind_tokens = !self.is_empty();
        let (mine, theirs) = (&mut self.output, next.output);
        if !behind_tokens {
            mine.kv_spans = theirs.kv_spans.or(mine.kv_spans.take());
        }
        mine.prompt_spans = mine.prompt_spans.take().or(theirs.prompt_spans);
        mine.new_token_ids.extend(theirs.new_token_ids);
        mine.finish_reason = theirs.finish_reason;
        mine.stop_reason = theirs.stop_reason;
        mine.error = theirs.error;
        mine.admission = theirs.admission.or(mine.admission.take());
        mine.prefill_stats = mine.prefill_stats.or(theirs.prefill_stats);
        mine.new_prompt_logprobs = mine.new_prompt_logprobs.take().or(theirs.new_prompt_logprobs);
        mine.routed_experts = theirs.routed_experts.or(mine.routed_experts.take());
        mine.num_nans_in_logits += theirs.num_nans_in_logits;
        for (name, value) in theirs.other {
            mine.other.retain(|(other, _)| *other != name);
            mine.other.push((name, value));
        }
        None
    }
}

/// One output sequence of a submission.
#[derive(Default)]
struct Choice {
    pending: VecDeque<Delta>,
    finished: bool,
    commits: Vec<(Option<u64>, usize)>,
    last_tokens: Option<Instant>,
}

struct State {
    choices: Vec<Choice>,
    /// The choices that have something pending, each once, in order of arrival.
    ready: VecDeque<usize>,
    /// Choices that have not finished.
    open: usize,
    failure: Option<RequestError>,
    waker: Option<Waker>,
}

/// Outputs of one submission, merged per choice while they wait.
pub(crate) struct Mailbox {
    /// The client's id.
    pub external_id: Arc<str>,
    /// Internal id of each choice.
    pub ids: Vec<Arc<str>>,
    /// Length of the prompt that all choices share.
    prompt_tokens: usize,
    delivery: Delivery,
    submitted: Instant,
    state: Mutex<State>,
}

impl Mailbox {
    pub fn new(external_id: Arc<str>, ids: Vec<Arc<str>>, prompt_tokens: usize, delivery: Delivery) -> Self {
        let choices: Vec<_> = ids.iter().map(|_| Choice::default()).collect();
        let state = State { open: choices.len(), choices, ready: VecDeque::new(), failure: None, waker: None };
        Self { external_id, ids, prompt_tokens, delivery, submitted: Instant::now(), state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether no choice is open any more.
    pub fn is_closed(&self) -> bool {
        self.state().open == 0
    }

    /// Adds what one step produced for one choice. Ignored after the choice's end.
    pub fn push(&self, delta: Delta, now: Instant, observer: &dyn Observer) {
        let mut state = self.state();
        let index = delta.choice;
        let Some(choice) = state.choices.get_mut(index).filter(|choice| !choice.finished) else {
            return;
        };
        if !delta.is_empty() {
            let before = choice.last_tokens.replace(now);
            let waited = now.saturating_duration_since(before.unwrap_or(self.submitted));
            let count = delta.output.new_token_ids.len();
            match before {
                None => observer.first_tokens(count, self.prompt_tokens, waited),
                Some(_) => observer.more_tokens(count, waited),
            }
            match choice.commits.last_mut() {
                Some((commit, tokens)) if *commit == delta.weight_commit => *tokens += count,
                _ => choice.commits.push((delta.weight_commit, count)),
            }
        }
        let finish = delta.output.finish_reason;
        if let Some(reason) = finish {
            choice.finished = true;
            observer.finished(Finished {
                reason,
                elapsed: now.saturating_duration_since(self.submitted),
                commits: std::mem::take(&mut choice.commits),
            });
        }
        let was_empty = choice.pending.is_empty();
        let rest = match choice.pending.back_mut() {
            Some(last) => last.absorb(delta),
            None => Some(delta),
        };
        choice.pending.extend(rest);
        if was_empty {
            state.ready.push_back(index);
        }
        state.open -= usize::from(finish.is_some());
        self.wake(state);
    }

    /// Ends all open choices with what they have and `abort`. Gives their internal ids.
    pub fn abort(&self, engine_index: u64, now: Instant, observer: &dyn Observer) -> Vec<Arc<str>> {
        let open = self.open_choices();
        for &choice in &open {
            let output = EngineCoreOutput {
                request_id: self.ids[choice].as_ref().into(),
                finish_reason: Some(FinishReason::Abort),
                ..EngineCoreOutput::default()
            };
            let delta = Delta { choice, engine_index, weight_version: None, weight_commit: None, output };
            self.push(delta, now, observer);
        }
        open.into_iter().map(|choice| Arc::clone(&self.ids[choice])).collect()
    }

    /// Ends all open choices with an error, behind what is pending already. Gives their internal ids.
    pub fn fail(&self, error: RequestError, now: Instant, observer: &dyn Observer) -> Vec<Arc<str>> {
        self.close(FinishReason::Error, Some(error), now, observer)
    }

    /// Ends all open choices because nobody waits for them any more. Gives their internal ids.
    pub fn abandon(&self, now: Instant, observer: &dyn Observer) -> Vec<Arc<str>> {
        self.close(FinishReason::Abort, None, now, observer)
    }

    fn close(
        &self,
        reason: FinishReason,
        error: Option<RequestError>,
        now: Instant,
        observer: &dyn Observer,
    ) -> Vec<Arc<str>> {
        let mut state = self.state();
        let mut closed = Vec::new();
        for (choice, id) in state.choices.iter_mut().zip(&self.ids).filter(|(choice, _)| !choice.finished) {
            choice.finished = true;
            let elapsed = now.saturating_duration_since(self.submitted);
            observer.finished(Finished { reason, elapsed, commits: std::mem::take(&mut choice.commits) });
            closed.push(Arc::clone(id));
        }
        if !closed.is_empty() {
            state.open = 0;
            state.failure = error;
            self.wake(state);
        }
        closed
    }

    fn open_choices(&self) -> Vec<usize> {
        let state = self.state();
        state.choices.iter().enumerate().filter(|(_, choice)| !choice.finished).map(|(index, _)| index).collect()
    }

    fn wake(&self, mut state: MutexGuard<'_, State>) {
        if self.delivery == Delivery::WhenFinished && state.open > 0 {
            return;
        }
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// The next delta in order of arrival; an error comes last, `None` after the end.
    pub fn poll_next(&self, context: &mut Context<'_>) -> Poll<Option<Result<Delta, RequestError>>> {
        let mut state = self.state();
        if self.delivery == Delivery::WhenFinished && state.open > 0 {
            state.waker = Some(context.waker().clone());
            return Poll::Pending;
        }
        if let Some(index) = state.ready.pop_front() {
            let pending = &mut state.choices[index].pending;
            let delta = pending.pop_front();
            if !pending.is_empty() {
                state.ready.push_front(index);
            }
            if delta.is_some() {
                return Poll::Ready(delta.map(Ok));
            }
        }
        if let Some(error) = state.failure.take() {
            return Poll::Ready(Some(Err(error)));
        }
        if state.open == 0 {
            return Poll::Ready(None);
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}
