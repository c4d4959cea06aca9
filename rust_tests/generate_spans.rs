//! The shared vectors of spans, run by Rust, and the laws of spans against a brute-force twin.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/vectors.rs"]
#[expect(dead_code, reason = "no messages here")]
mod vectors;

use proptest::collection::vec;
use proptest::prelude::*;
use rollspan_generate::SpanBuilder;
use serde_json::{Value, json};
use vectors::{load, text};

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

#[test]
fn stamps_make_the_spans_of_their_vector() {
    for case in load("spans.json")["cases"].as_array().unwrap() {
        let mut builder = SpanBuilder::default();
        for push in case["pushes"].as_array().unwrap() {
            builder.push(push[0].as_str(), push[1].as_u64(), number(&push[2]));
        }
        let start = case.get("start").map_or(0, number);
        let end = case.get("total").map_or(builder.tokens(), number);
        let spans = builder.between(start, end);
        let title = text(&case["title"]);
        assert_eq!(json!(spans.versions), case["versions"], "{title}");
        assert_eq!(json!(spans.commits), case["commits"], "{title}");
    }
}

/// One stamp a token, grouped afterwards.
fn brute_force<T: Clone + PartialEq>(
    stamps: &[Option<T>],
    start: usize,
    end: usize,
) -> Option<Vec<(Option<T>, usize, usize)>> {
    if start == end {
        return Some(Vec::new());
    }
    stamps.iter().any(Option::is_some).then(|| {
        let mut spans: Vec<(Option<T>, usize, usize)> = Vec::new();
        for (position, stamp) in stamps.iter().enumerate().take(end).skip(start) {
            match spans.last_mut() {
                Some((last, _, last_end)) if last == stamp => *last_end = position + 1,
                _ => spans.push((stamp.clone(), position, position + 1)),
            }
        }
        spans
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_slice_equals_the_brute_force_grouping(
        pushes in vec((proptest::option::of("[AB]?"), proptest::option::of(0_u64..4), 0_usize..5), 0..30),
        cuts in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
    ) {
        let mut builder = SpanBuilder::default();
        let (mut versions, mut commits) = (Vec::new(), Vec::new());
        for (version, commit, tokens) in &pushes {
            builder.push(version.as_deref(), *commit, *tokens);
            versions.extend(std::iter::repeat_n(version.clone(), *tokens));
            commits.extend(std::iter::repeat_n(*commit, *tokens));
        }
        prop_assert_eq!(builder.tokens(), versions.len());
        let (first, second) = (cuts.0.index(versions.len() + 1), cuts.1.index(versions.len() + 1));
        let (start, end) = (first.min(second), first.max(second));
        let spans = builder.between(start, end);
        let got = spans.versions.map(|spans| {
            spans.into_iter().map(|span| (span.version.map(|label| label.to_string()), span.start, span.end)).collect()
        });
        prop_assert_eq!(got, brute_force(&versions, start, end));
        let got = spans.commits.map(|spans| spans.into_iter().map(|span| (span.commit, span.start, span.end)).collect());
        prop_assert_eq!(got, brute_force(&commits, start, end));
    }
}
