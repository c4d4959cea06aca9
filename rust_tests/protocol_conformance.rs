//! The shared vectors of the engine link, run by the Rust codec; `tests/unit/test_conformance.py` runs the same files.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/vectors.rs"]
mod vectors;

use rollspan_protocol::{FrameKind, decode_outputs, encode_frame, split_frame};
use vectors::{bytes, cases, frames, load, text, view};

#[test]
fn a_message_means_what_its_vector_says() {
    for file in ["vllm_wire.json", "link.json"] {
        for (name, case) in cases(&load(file), "accepted") {
            let meaning = view(text(&case["kind"]), &frames(&case)).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(meaning, case["meaning"], "{name}");
        }
    }
}

#[test]
fn a_message_is_refused_for_the_reason_of_its_vector() {
    for (name, case) in cases(&load("link.json"), "refused") {
        let error = view(text(&case["kind"]), &frames(&case)).expect_err(&name);
        if let Some(reason) = case["reason"].as_str() {
            assert_eq!(error.reason(), reason, "{name}: {error}");
        }
    }
}

#[test]
fn what_is_encoded_means_the_same_as_what_was_decoded() {
    for file in ["vllm_wire.json", "link.json"] {
        for (name, case) in cases(&load(file), "accepted").into_iter().filter(|(name, _)| name.starts_with("outputs")) {
            let frames = frames(&case);
            let frames: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
            let message = decode_outputs(&frames).expect(&name).value;
            let again = decode_outputs(&[&message.encode()]).expect(&name);
            assert_eq!(again.value, message, "{name}");
            assert_eq!(again.skipped_fields, 0, "{name}");
        }
    }
}

#[test]
fn frames_are_taken_apart_and_put_together_as_the_vectors_say() {
    let framing = &load("link.json")["framing"];
    let limit = usize::try_from(framing["limit"].as_u64().unwrap()).unwrap();
    for case in framing["accepted"].as_array().unwrap() {
        let kind = FrameKind::try_from(u8::try_from(case["kind"].as_u64().unwrap()).unwrap()).unwrap();
        let (payload, frame) = (bytes(text(&case["payload"])), bytes(text(&case["frame"])));
        assert_eq!(encode_frame(kind, &payload, limit), Ok(frame.clone()));
        let followed = [&frame[..], b"next"].concat();
        assert_eq!(split_frame(&followed, limit), Ok(Some((kind, &payload[..], &b"next"[..]))));
        assert_eq!(split_frame(&frame[..frame.len() - 1], limit), Ok(None));
    }
    for frame in framing["refused"].as_array().unwrap() {
        assert!(split_frame(&bytes(text(frame)), limit).is_err(), "{frame}");
    }
}
