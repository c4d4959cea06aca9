//! Rows of a batch, shared out over the pool.

use std::cell::RefCell;

use super::mass::{self, Distribution};
use super::row::{Logits, Outcome, Row};
use super::scan;
use super::truncate::{self, Workspace};
use crate::isa::Isa;
use crate::pool::pool;

/// Logits that a task should at least go through: waking a thread costs more than a small vocabulary.
const TASK_LOGITS: usize = 1 << 16;

/// Rows of logits, and where their results go.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// `count` rows.
    pub rows: *const Row,
    /// `count` outcomes.
    pub outcomes: *mut Outcome,
    /// `count` times `columns` token ids: the sampled one, then the best ones.
    pub ids: *mut i32,
    /// As many log-probs.
    pub logprobs: *mut f32,
    /// Number of rows.
    pub count: usize,
    /// Tokens of a row.
    pub vocabulary: usize,
    /// Room for results of one row; at least one more than the largest `num_top`.
    pub columns: usize,
}

// SAFETY: each row, and what belongs to it, is used by one task only.
unsafe impl Sync for Job {}

/// What belongs to one row.
struct Item<'a> {
    row: &'a Row,
    outcome: &'a mut Outcome,
    ids: &'a mut [i32],
    logprobs: &'a mut [f32],
}

impl Job {
    /// # Safety
    /// Called once for each `index` below `count`, and the pointers are what they are said to be.
    unsafe fn item(&self, index: usize) -> Item<'_> {
        let start = index * self.columns;
        // SAFETY: the caller's promise.
        unsafe {
            Item {
                row: &*self.rows.add(index),
                outcome: &mut *self.outcomes.add(index),
                ids: std::slice::from_raw_parts_mut(self.ids.add(start), self.columns),
                logprobs: std::slice::from_raw_parts_mut(self.logprobs.add(start), self.columns),
            }
        }
    }

    /// Calls `task` with each row, on the threads of the pool.
    ///
    /// # Safety
    /// As of [`Job::item`].
    unsafe fn share(&self, task: impl Fn(Item<'_>, &mut Scratch) + Sync) {
        thread_local! {
            static SCRATCH: RefCell<Scratch> = RefCell::default();
        }
        let each = (TASK_LOGITS / self.vocabulary.max(1)).max(1);
        pool().run(self.count.div_ceil(each), |part| {
            SCRATCH.with_borrow_mut(|scratch| {
                for index in part * each..self.count.min((part + 1) * each) {
                    // SAFETY: the tasks are disjoint.
                    task(unsafe { self.item(index) }, scratch);
                }
            });
        });
    }
}

/// Samples a token for each row and reports log-probs where a row asks for them.
///
/// # Safety
/// The job's pointers are valid for their lengths, and `scores` and `reported` of each row for `vocabulary` elements of
/// their types; nothing else writes there.
pub unsafe fn sample_rows(job: &Job, raw_logprobs: bool) {
    let isa = Isa::active();
    // SAFETY: the caller's promise.
    unsafe {
        job.share(|item, scratch| {
            let logits = |address, kind| Logits::new(address, kind, job.vocabulary);
            let scores = logits(item.row.scores, item.row.scores_kind);
            let raw = raw_logprobs.then(|| logits(item.row.reported, item.row.reported_kind));
            sample(isa, item, scores, raw, scratch);
        });
    }
}

/// Reports log-probs of the tokens in the outcomes, under the distribution of `reported` alone.
///
/// # Safety
/// As of [`sample_rows`]; `scores` is not read.
pub unsafe fn score_rows(job: &Job) {
    let isa = Isa::active();
    // SAFETY: the caller's promise.
    unsafe {
        job.share(|mut item, scratch| {
            let reported = Logits::new(item.row.reported, item.row.reported_kind, job.vocabulary);
            let Scratch { maxima, masses, workspace } = scratch;
            let row = scan::survey(isa, reported, maxima);
            let token = usize::try_from(item.outcome.token).ok().filter(|&token| token < reported.len());
            item.outcome.valid = u8::from(row.is_some() && token.is_some());
            if let (Some(row), Some(token)) = (row, token) {
                let from = Distribution::new(row, 1.0);
                let total = mass::masses(isa, from, masses);
                report(isa, from, total, token, &mut item, workspace);
            }
        });
    }
}

#[derive(Default)]
struct Scratch {
    maxima: Vec<f32>,
    masses: Vec<u64>,
    workspace: Workspace,
}

fn sample(isa: Isa, mut item: Item<'_>, scores: Logits, raw: Option<Logits>, scratch: &mut Scratch) {
    let Scratch { maxima, masses, workspace } = scratch;
    *item.outcome = Outcome::default();
    let greedy = item.row.temperature <= 0.0;
    let temperature = if greedy { 1.0 } else { item.row.temperature };
    let Some(row) = scan::survey(isa, scores, maxima).filter(|row| (row.highest / temperature).is_finite()) else {
        return;
    };
    let wanted = item.row.num_top >= 0;
    let mut from = Distribution::new(row, temperature);
    let mut total = None;
    let token = if greedy {
        scan::first_best(row)
    } else {
        let (chosen, mass) = draw(isa, item.row, &mut from, masses, workspace);
        total = Some(mass);
        chosen
    };
    item.outcome.token = token.cast_signed() as i64;
    item.outcome.valid = 1;
    if !wanted {
        return;
    }
    if let Some(raw) = raw {
        #[expect(clippy::float_cmp, reason = "1 is exact")]
        let same = raw == scores && from.temperature == 1.0 && from.keep == mass::Keep::ALL;
        if !same {
            total = None;
        }
        let row = if raw == scores { Some(row) } else { scan::survey(isa, raw, maxima) };
        let Some(row) = row else {
            *item.outcome = Outcome::default();
            return;
        };
        from = Distribution::new(row, 1.0);
    }
    let total = total.unwrap_or_else(|| mass::masses(isa, from, masses));
    report(isa, from, total, token, &mut item, workspace);
}

/// Truncates `from`, draws from what is left, and tells its mass.
fn draw(
    isa: Isa,
    row: &Row,
    from: &mut Distribution<'_>,
    masses: &mut Vec<u64>,
    workspace: &mut Workspace,
) -> (usize, u64) {
    from.keep = truncate::floor(isa, row, from, workspace);
    let mut total = mass::masses(isa, *from, masses);
    if row.top_p < 1.0 {
        let keep = truncate::nucleus(isa, *from, total, row.top_p, workspace);
        if keep != from.keep {
            from.keep = keep;
            total = mass::masses(isa, *from, masses);
        }
    }
    #[expect(clippy::cast_possible_truncation, reason = "less than the total, as the draw is less than 2^53")]
    let target = ((u128::from(row.draw()) * u128::from(total)) >> 53) as u64;
    (mass::find(isa, *from, masses, target), total)
}

fn report(isa: Isa, from: Distribution<'_>, total: u64, token: usize, item: &mut Item<'_>, workspace: &mut Workspace) {
    let logit = from.row.logits.at(token);
    item.outcome.rank = scan::greater(isa, from.row, logit).cast_signed() + 1;
    #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "token ids fit 31 bits")]
    let first = token as i32;
    item.ids[0] = first;
    // Finite, whatever single precision makes of it.
    item.logprobs[0] = from.logprob(logit, total).max(f32::MIN);
    let count = usize::try_from(item.row.num_top).unwrap_or(0);
    if count == 0 {
        return;
    }
    scan::best(isa, from.row, count, &mut workspace.values, &mut workspace.candidates);
    let outputs = item.ids[1..].iter_mut().zip(&mut item.logprobs[1..]);
    for (candidate, (id, logprob)) in workspace.candidates.iter().zip(outputs) {
        let kept = from.keep.allows(candidate.logit, from.exponent(candidate.logit), candidate.token as usize);
        *id = candidate.token.cast_signed();
        *logprob = if kept { from.logprob(candidate.logit, total) } else { f32::NEG_INFINITY };
    }
}
