//! Bounded random mutation of request bodies: each becomes a request within the limits, or an error with a short message.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "support/random.rs"]
mod random;
#[path = "support/vectors.rs"]
#[expect(dead_code, reason = "this test needs the bytes of the vectors, not their meaning")]
mod vectors;

use random::Random;
use rollspan_generate::{GenerateRequest, Served, ignored_fields_header};
use rollspan_protocol::Limits;
use vectors::{load, text};

const ROUNDS: usize = 20_000;
const VOCABULARY: u64 = 64;
const LENGTH: u64 = 16;

fn parse(body: &[u8], served: &Served) {
    match GenerateRequest::parse(body, None, served, false) {
        Ok(request) => {
            let (params, prompt) = (&request.sampling_params, request.token_ids.len() as u64);
            assert!((1..LENGTH).contains(&prompt));
            assert!(request.token_ids.iter().chain(&params.stop_token_ids).all(|id| u64::from(*id) < VOCABULARY));
            assert!((1..=LENGTH - prompt).contains(&params.max_tokens));
            assert!(params.min_tokens <= params.max_tokens);
            assert!((0.0..=2.0).contains(&params.temperature) && (0.0..=1.0).contains(&params.top_p));
            assert!(ignored_fields_header(&request.ignored_fields).is_none_or(|header| header.is_ascii()));
        }
        Err(error) => {
            assert_eq!(error.status() / 100, 4);
            // Names of unknown models are shown whole.
            assert!(error.message.len() < 1024 + body.len(), "{}", error.message);
        }
    }
}

#[test]
fn mutated_bodies_never_panic() {
    let limits = Limits { max_model_len: LENGTH, vocab_size: VOCABULARY, max_logprobs: 20, ..Limits::default() };
    let served = Served { model: "toy".to_owned(), limits, eos_token_ids: vec![1, 2] };
    let file = load("generate_validation.json");
    let bodies = file["cases"].as_array().unwrap().iter().filter_map(|case| case.get("body"));
    let corpus: Vec<Vec<u8>> = bodies.map(|body| text(body).as_bytes().to_vec()).collect();
    let mut random = Random(11);
    for _ in 0..ROUNDS {
        let mut body = corpus[random.below(corpus.len())].clone();
        let donor = random.below(corpus.len());
        random.mutate(&mut body, &corpus[donor]);
        parse(&body, &served);
    }
}
