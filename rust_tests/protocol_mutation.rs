//! Bounded random mutation of the vectors: whatever comes in, a decoder answers, and what it accepts it can encode.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/random.rs"]
mod random;
#[path = "support/vectors.rs"]
#[expect(dead_code, reason = "this test needs the bytes of the vectors, not their meaning")]
mod vectors;

use random::Random;
use rollspan_protocol::{
    ClientHello, Dead, EngineCoreRequest, EngineHello, UtilityRequest, decode_abort, decode_outputs,
    recover_request_ids, split_frame,
};
use vectors::{cases, frames, load};

const ROUNDS: usize = 40_000;

fn decode_everything(bytes: &[u8]) {
    if let Ok(decoded) = decode_outputs(&[bytes]) {
        assert!(decode_outputs(&[&decoded.value.encode()]).is_ok());
    }
    if let Ok(decoded) = EngineCoreRequest::decode(bytes) {
        assert!(EngineCoreRequest::decode(&decoded.value.encode()).is_ok());
    }
    if let Ok(decoded) = UtilityRequest::decode(bytes) {
        assert!(UtilityRequest::decode(&decoded.value.encode()).is_ok());
    }
    let _outcomes = (decode_abort(bytes), ClientHello::decode(bytes), EngineHello::decode(bytes), Dead::decode(bytes));
    let _frames = split_frame(bytes, 1024);
    recover_request_ids(&[bytes]);
}

#[test]
fn mutated_messages_never_panic() {
    let files = [load("vllm_wire.json"), load("link.json")];
    let corpus: Vec<Vec<u8>> = files
        .iter()
        .flat_map(|file| ["accepted", "refused"].map(|part| (file, part)))
        .filter(|(file, part)| file.get(part).is_some())
        .flat_map(|(file, part)| cases(file, part))
        .map(|(_, case)| frames(&case).swap_remove(0))
        .collect();
    for bytes in &corpus {
        decode_everything(bytes);
    }
    let mut random = Random(7);
    for _ in 0..ROUNDS {
        let mut bytes = corpus[random.below(corpus.len())].clone();
        let donor = random.below(corpus.len());
        random.mutate(&mut bytes, &corpus[donor]);
        decode_everything(&bytes);
    }
}
