//! Which tokens top-k, min-p and top-p leave.

use super::histogram;
use super::mass::{self, Distribution, Keep};
use super::row::Row;
use super::scan::{self, Candidate};
use crate::isa::Isa;

/// Best tokens among which the boundary of top-p is looked for first.
const NUCLEUS_CANDIDATES: usize = 64;

/// Memory that is used again for every row.
#[derive(Default)]
pub(super) struct Workspace {
    pub values: Vec<f32>,
    pub weights: Vec<f32>,
    pub candidates: Vec<Candidate>,
}

/// What top-k and min-p leave.
pub(super) fn floor(isa: Isa, row: &Row, from: &Distribution<'_>, workspace: &mut Workspace) -> Keep {
    let mut keep = Keep::ALL;
    if let Ok(count) = usize::try_from(row.top_k)
        && (1..from.row.logits.len()).contains(&count)
    {
        keep.logit = scan::nth(isa, from.row, count, &mut workspace.values, &mut workspace.candidates);
    }
    if row.min_p > 0.0 {
        keep.exponent = row.min_p.ln();
    }
    keep
}

/// What top-p leaves of `from`, whose mass is `total`: the fewest best tokens whose share reaches `share`.
pub(super) fn nucleus(isa: Isa, from: Distribution<'_>, total: u64, share: f32, workspace: &mut Workspace) -> Keep {
    #[expect(clippy::cast_precision_loss, reason = "relative to the total, 2^-53")]
    let limit = f64::from(share) * total as f64;
    let Workspace { values, candidates, .. } = workspace;
    let least = scan::candidates(isa, from.row, NUCLEUS_CANDIDATES, values, candidates);
    candidates.retain(|c| from.keep.allows(c.logit, from.exponent(c.logit), c.token as usize));
    if let Some(keep) = boundary(isa, from, 0, limit, workspace) {
        return keep;
    }
    // Every token that counts was among the candidates: the share is reached with the last one.
    let exponent = from.exponent(least);
    if least <= from.keep.logit || exponent < from.keep.exponent || exponent < mass::LEAST_EXPONENT {
        return from.keep;
    }
    let bins = histogram::histogram(isa, from);
    let mut before = 0;
    for (bin, &mass) in bins.iter().enumerate() {
        if reaches(before + mass, limit) {
            histogram::members(isa, from, bin, &mut workspace.candidates);
            return boundary(isa, from, before, limit, workspace).unwrap_or(from.keep);
        }
        before += mass;
    }
    from.keep
}

/// What is kept, where the candidates (complete from some logit on) reach the limit, `before` being the mass of better
/// tokens.
fn boundary(isa: Isa, from: Distribution<'_>, mut before: u64, limit: f64, workspace: &mut Workspace) -> Option<Keep> {
    let Workspace { values, weights, candidates } = workspace;
    candidates.sort_unstable_by(Candidate::order);
    values.clear();
    values.extend(candidates.iter().map(|candidate| candidate.logit));
    mass::weights(isa, from, values, weights);
    for (candidate, &weight) in candidates.iter().zip(weights.iter()) {
        before += mass::mass(weight);
        if reaches(before, limit) {
            return Some(Keep { logit: candidate.logit, last: candidate.token as usize, ..from.keep });
        }
    }
    None
}

fn reaches(mass: u64, limit: f64) -> bool {
    #[expect(clippy::cast_precision_loss, reason = "as the limit")]
    let mass = mass as f64;
    mass >= limit
}
