//! Cost of the Rust codec: one engine step's OUTPUTS message, one request, one answer, one stream chunk.
//!
//! `cargo bench -p rollspan-generate --bench codec` prints a table, `-- --json` the same figures as JSON.
//! `benchmarks/codec.py` measures the same messages in Python.

#![allow(clippy::expect_used, clippy::print_stdout, reason = "a benchmark prints, and ends at the first surprise")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use rollspan_generate::{AnswerFacts, Choice, ChunkWriter, GenerateRequest, Served, collected};
use rollspan_protocol::{
    Batch, Body, EngineCoreOutput, EngineCoreOutputs, FinishReason, Limits, LogprobsLists, decode_outputs,
};

const ROUNDS: usize = 200;
const ROUND: Duration = Duration::from_millis(2);

struct Figure {
    name: String,
    microseconds: f64,
    bytes: usize,
}

/// Mean time of one call in the fastest of many short rounds, so that neighbours on the machine count little.
fn measure<T>(name: impl Into<String>, bytes: usize, mut call: impl FnMut() -> T) -> Figure {
    let start = Instant::now();
    let mut calls = 0_u32;
    while start.elapsed() < ROUND {
        black_box(call());
        calls += 1;
    }
    let mut round = || {
        let start = Instant::now();
        for _ in 0..calls {
            black_box(call());
        }
        start.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
    };
    let microseconds = (0..ROUNDS).map(|_| round()).fold(f64::INFINITY, f64::min);
    Figure { name: name.into(), microseconds, bytes }
}

fn logprobs(top: usize) -> LogprobsLists {
    let width = top + 1;
    LogprobsLists {
        width,
        token_ids: (0_u32..).take(width).collect(),
        logprobs: vec![-0.5; width],
        sampled_ranks: vec![1],
        cumulative: None,
    }
}

/// A step of `outputs` requests with one new token each.
fn step(outputs: usize, top: Option<usize>) -> EngineCoreOutputs {
    let output = |index: usize| EngineCoreOutput {
        request_id: format!("{index:032x}-0a1b2c3d"),
        new_token_ids: vec![1234],
        new_logprobs: top.map(logprobs),
        ..EngineCoreOutput::default()
    };
    EngineCoreOutputs {
        engine_index: 0,
        timestamp: 1.5,
        weight_version: Some("step-42".into()),
        weight_commit: Some(42),
        body: Body::Batch(Batch { outputs: (0..outputs).map(output).collect(), ..Batch::default() }),
    }
}

fn codec_figures(figures: &mut Vec<Figure>) {
    for top in [None, Some(0), Some(5)] {
        for outputs in [1, 32, 256] {
            let message = step(outputs, top);
            let payload = message.encode();
            let kind = top.map_or_else(|| "tokens".to_owned(), |top| format!("log-probs {top}"));
            let size = payload.len();
            figures.push(measure(format!("decode {outputs} outputs, {kind}"), size, || decode_outputs(&[&payload])));
            figures.push(measure(format!("encode {outputs} outputs, {kind}"), size, || message.encode()));
        }
    }
}

fn request_figures(figures: &mut Vec<Figure>) {
    let limits = Limits { max_model_len: 1 << 20, vocab_size: 100_000, max_logprobs: 20, ..Limits::default() };
    let served = Served { model: "toy".to_owned(), limits, eos_token_ids: vec![1] };
    for prompt in [128_u32, 8192] {
        let ids: Vec<String> = (0..prompt).map(|id| (id * 7 % 100_000).to_string()).collect();
        let body = format!(r#"{{"token_ids":[{}],"sampling_params":{{"max_tokens":64,"seed":7}}}}"#, ids.join(","));
        let parse = || GenerateRequest::parse(body.as_bytes(), None, &served, false).expect("a valid body");
        figures.push(measure(format!("parse a body of {prompt} prompt tokens"), body.len(), parse));
        let request = parse();
        let encode = || request.engine_requests("request", 7, 1.5, None)[0].encode();
        figures.push(measure(format!("encode a request of {prompt} prompt tokens"), encode().len(), encode));
    }
}

fn answer_figures(figures: &mut Vec<Figure>) {
    let limits = Limits { max_model_len: 1 << 20, vocab_size: 100_000, max_logprobs: 20, ..Limits::default() };
    let served = Served { model: "toy".to_owned(), limits, eos_token_ids: vec![1] };
    let facts = AnswerFacts {
        request_id: "request".to_owned(),
        model: "toy".to_owned(),
        created: 1_800_000_000,
        engine_index: 0,
    };
    for (kind, sampling, top) in [("tokens", "", None), ("log-probs 0", r#""logprobs":0"#, Some(0))] {
        let body = format!(r#"{{"token_ids":[1],"sampling_params":{{{sampling}}},"stream":true}}"#);
        let request = GenerateRequest::parse(body.as_bytes(), None, &served, false).expect("a valid body");
        let token = |finish_reason| EngineCoreOutput {
            new_token_ids: vec![1234],
            new_logprobs: top.map(logprobs),
            finish_reason,
            ..EngineCoreOutput::default()
        };
        let mut whole = [Choice::new(0, top.is_some())];
        for index in 0..1024 {
            let finish_reason = (index == 1023).then_some(FinishReason::Length);
            whole[0].push(token(finish_reason), Some("step-42"), Some(index / 100)).expect("a good output");
        }
        let answer = || collected(&request, &facts, &whole).expect("JSON");
        figures.push(measure(format!("answer of 1024 tokens, {kind}"), answer().len(), answer));
        let mut choices = [Choice::new(0, top.is_some())];
        let mut writer = ChunkWriter::default();
        let mut chunk = || {
            choices[0].push(token(None), Some("step-42"), Some(42)).expect("a good output");
            writer.chunk(&request, &facts, &mut choices, 0).expect("JSON").expect("a chunk")
        };
        let size = chunk().len();
        figures.push(measure(format!("chunk of one token, {kind}"), size, chunk));
    }
}

fn main() {
    let mut figures = Vec::new();
    codec_figures(&mut figures);
    request_figures(&mut figures);
    answer_figures(&mut figures);
    if std::env::args().any(|argument| argument == "--json") {
        let rows: Vec<_> = figures
            .iter()
            .map(|figure| serde_json::json!({"name": figure.name, "microseconds": figure.microseconds, "bytes": figure.bytes}))
            .collect();
        println!("{}", serde_json::json!({"language": "rust", "figures": rows}));
        return;
    }
    println!("{:<48} {:>12} {:>10}", "rust", "µs", "bytes");
    for figure in figures {
        println!("{:<48} {:>12.2} {:>10}", figure.name, figure.microseconds, figure.bytes);
    }
}
