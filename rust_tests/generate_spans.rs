//! The shared vectors of spans and KV versions, run by Rust, and their laws against brute-force twins.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/vectors.rs"]
#[expect(dead_code, reason = "no messages here")]
mod vectors;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use rollspan_generate::{KvSpansError, KvVersionBuilder, SpanBuilder};
use rollspan_protocol::StampSpan;
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

fn kv_builder(case: &Value) -> Result<KvVersionBuilder, KvSpansError> {
    let position = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
    let span = |span: &Value| StampSpan {
        weight_version: text(&span[0]).into(),
        weight_commit: span[1].as_u64().unwrap(),
        start: position(&span[2]),
        end: position(&span[3]),
    };
    let mut builder = KvVersionBuilder::new(number(&case["prompt_length"]));
    for push in case["pushes"].as_array().unwrap() {
        let spans = push.get(3).and_then(Value::as_array).map(|spans| spans.iter().map(span).collect());
        builder.push(push[0].as_str(), push[1].as_u64(), number(&push[2]), spans)?;
    }
    Ok(builder)
}

#[test]
fn stamps_and_kv_spans_make_the_kv_versions_of_their_vector() {
    for case in load("kv_versions.json")["cases"].as_array().unwrap() {
        let builder = kv_builder(case).unwrap();
        let versions = builder.finish(case.get("total").map_or(usize::MAX, number));
        assert_eq!(json!(versions), case["kv_versions"], "{}", text(&case["title"]));
    }
}

#[test]
fn kv_spans_that_do_not_cover_what_came_before_are_refused() {
    for case in load("kv_versions.json")["refused"].as_array().unwrap() {
        let error = kv_builder(case).err().unwrap_or_else(|| panic!("{}", text(&case["title"])));
        assert!(error.to_string().starts_with("KV spans"), "{error}");
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

    /// The twin keeps the whole KV of every token.
    #[test]
    fn kv_versions_say_what_each_token_attended_to(
        prompt_length in 1_usize..4,
        pushes in vec((0_u64..3, 0_usize..3, option::of(0_u64..3)), 1..12),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut builder = KvVersionBuilder::new(prompt_length);
        let mut kv = vec![None; prompt_length];
        let (mut attended, mut said) = (Vec::new(), false);
        for (commit, tokens, recomputed) in pushes {
            let length = u32::try_from(kv.len()).unwrap();
            // All positions by one commit, as after a recompute; the position before the first token is a new one.
            let before = length + u32::from(!attended.is_empty());
            let spans = recomputed.map(|commit| {
                vec![StampSpan { weight_version: "v".into(), weight_commit: commit, start: 0, end: before }]
            });
            builder.push(Some("v"), Some(commit), tokens, spans).unwrap();
            for token in 0..tokens {
                if !attended.is_empty() {
                    kv.push(Some(commit));
                }
                if let Some(commit) = recomputed.filter(|_| token == 0) {
                    kv.fill(Some(commit));
                    said = true;
                }
                attended.push(kv.clone());
            }
        }
        let total = cut.index(attended.len() + 1);
        let Some(segments) = builder.finish(total) else {
            prop_assert!(!said && total > 0);
            return Ok(());
        };
        let mut next = 0;
        for segment in segments {
            prop_assert_eq!(segment.start, next);
            next = segment.end;
            let flat: Vec<_> = segment.kv.iter().flat_map(|span| vec![span.commit; span.end - span.start]).collect();
            prop_assert!(segment.kv.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].commit != pair[1].commit));
            for (token, kv) in attended.iter().enumerate().take(segment.end).skip(segment.start) {
                prop_assert_eq!(&flat[..prompt_length + token], &kv[..]);
            }
            prop_assert_eq!(flat.len(), prompt_length + segment.end - 1);
        }
        prop_assert_eq!(next, total);
    }
}
