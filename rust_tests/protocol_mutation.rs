//! Bounded random mutation of the vectors: whatever comes in, a decoder answers, and what it accepts it can encode.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/vectors.rs"]
#[expect(dead_code, reason = "this test needs the bytes of the vectors, not their meaning")]
mod vectors;

use rollspan_protocol::{
    ClientHello, Dead, EngineCoreRequest, EngineHello, UtilityRequest, decode_abort, decode_outputs,
    recover_request_ids, split_frame,
};
use vectors::{cases, frames, load};

const ROUNDS: usize = 40_000;

/// `SplitMix64`: the same mutations in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound.max(1) as u64).unwrap()
    }

    fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[0]
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>, donor: &[u8]) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(6) {
                _ if bytes.is_empty() => bytes.push(self.byte()),
                0 => bytes[at] = self.byte(),
                1 => bytes[at] ^= 1 << self.below(8),
                2 => bytes.truncate(at),
                3 => bytes.insert(at, self.byte()),
                4 => drop(bytes.remove(at)),
                _ => {
                    let from = self.below(donor.len());
                    bytes.splice(at.., donor[from.min(donor.len())..].iter().copied());
                }
            }
        }
    }
}

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
