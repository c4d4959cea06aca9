//! Bodies of generate requests: each becomes a request within the limits, or an error with a bounded message.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rollspan_generate::{GenerateRequest, Served};
use rollspan_protocol::Limits;

fuzz_target!(|body: &[u8]| {
    let limits = Limits { max_model_len: 64, vocab_size: 100, max_logprobs: 5, ..Limits::default() };
    let served = Served { model: "toy".to_owned(), limits, eos_token_ids: vec![1] };
    if let Ok(request) = GenerateRequest::parse(body, None, &served, false) {
        let params = &request.sampling_params;
        assert!((1..64).contains(&request.token_ids.len()));
        assert!(request.token_ids.iter().all(|id| *id < 100));
        assert!(params.min_tokens <= params.max_tokens && params.max_tokens <= 64 - request.token_ids.len() as u64);
        assert_eq!(request.engine_requests("id", 0, 0.0, None).len() as u64, params.n);
    }
});
