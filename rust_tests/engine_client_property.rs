//! Merging is invisible: whenever a taker takes, and whether it wants each step or the whole, it gets the same tokens
//! under the same weights, each once and in order.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use proptest::prelude::*;
use rollspan_engine_client::mock::{MockEngine, MockLink, finished, hello, step, tokens};
use rollspan_engine_client::{Connection, Delivery, Delta, EngineClient, NoObserver, RequestStream, Submission};
use rollspan_protocol::{EngineCoreOutput, EngineCoreRequest, FinishReason, LogprobsLists};

const CHOICES: usize = 3;

/// What the engine does next.
#[derive(Debug, Clone)]
struct Step {
    /// New tokens of each choice; the last one's come with log-probs.
    counts: [usize; CHOICES],
    /// Which weights.
    commit: u64,
    /// The taker takes what is there.
    take: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = ([0..3_usize, 0..3, 0..3], 0..3_u64, any::<bool>());
    let step = step.prop_map(|(counts, commit, take)| Step { counts, commit, take });
    proptest::collection::vec(step, 0..12)
}

/// A token, the commit number behind it, and its log-prob row where it has one.
type Seen = (u32, Option<u64>, Option<u32>);

fn output(choice: usize, new: &[u32]) -> EngineCoreOutput {
    let id = format!("{choice}_a");
    if choice + 1 < CHOICES || new.is_empty() {
        return tokens(&id, new);
    }
    let logprobs = LogprobsLists {
        width: 1,
        token_ids: new.to_vec(),
        logprobs: vec![-1.0; new.len()],
        sampled_ranks: new.to_vec(),
        cumulative: None,
    };
    EngineCoreOutput { new_logprobs: Some(logprobs), ..tokens(&id, new) }
}

fn note(delta: &Delta, seen: &mut [Vec<Seen>; CHOICES]) {
    let rows = delta.output.new_logprobs.as_ref().map(|lists| &lists.sampled_ranks);
    for (index, token) in delta.output.new_token_ids.iter().enumerate() {
        seen[delta.choice].push((*token, delta.weight_commit, rows.map(|ranks| ranks[index])));
    }
}

/// Makes sure that the client has taken in everything that was sent: messages come in order.
async fn settle(client: &EngineClient, link: &mut MockLink) {
    let answer = async {
        let call = link.call().await;
        link.answer(call.call_id, Ok(serde_json::Value::Null)).await;
    };
    let (settled, ()) = tokio::join!(client.call("resume_scheduler", Vec::new()), answer);
    settled.unwrap();
}

fn take_ready(stream: &mut RequestStream, seen: &mut [Vec<Seen>; CHOICES]) {
    let mut context = Context::from_waker(Waker::noop());
    while let Poll::Ready(Some(delta)) = stream.poll_next(&mut context) {
        note(&delta.unwrap(), seen);
    }
}

async fn run(steps: &[Step], delivery: Delivery) -> ([Vec<Seen>; CHOICES], [Vec<Seen>; CHOICES]) {
    let engine = MockEngine::bind();
    let path = engine.path();
    let hello = hello();
    let (connection, mut link) = tokio::join!(Connection::open(&path, Duration::from_secs(20)), engine.accept(&hello));
    let client = connection.unwrap().start(Box::new(NoObserver));
    let request = |choice| EngineCoreRequest { request_id: format!("{choice}_a"), ..EngineCoreRequest::default() };
    let requests = (0..CHOICES).map(request).collect();
    let mut stream = client.submit(Submission { external_id: "a".to_owned(), requests, delivery }).unwrap();
    for _ in 0..CHOICES {
        link.request().await;
    }
    let (mut sent, mut seen) = (<[Vec<Seen>; CHOICES]>::default(), <[Vec<Seen>; CHOICES]>::default());
    let mut next_token = 0..;
    for Step { counts, commit, take } in steps {
        let mut outputs = Vec::new();
        for (choice, count) in counts.iter().enumerate() {
            let new: Vec<u32> = next_token.by_ref().take(*count).collect();
            let row = |token| (choice + 1 == CHOICES).then_some(token);
            sent[choice].extend(new.iter().map(|token| (*token, Some(*commit), row(*token))));
            outputs.push(output(choice, &new));
        }
        link.send(&step(&format!("v{commit}"), *commit, outputs)).await;
        if *take {
            settle(&client, &mut link).await;
            take_ready(&mut stream, &mut seen);
        }
    }
    let ends = (0..CHOICES).map(|choice| finished(&format!("{choice}_a"), &[], FinishReason::Stop)).collect();
    link.send(&step("v9", 9, ends)).await;
    while let Some(delta) = stream.next().await {
        note(&delta.unwrap(), &mut seen);
    }
    (sent, seen)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_taker_gets_every_token_once_under_its_own_weights(steps in steps(), whole in any::<bool>()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let delivery = if whole { Delivery::WhenFinished } else { Delivery::EachStep };
        let (sent, seen) = runtime.block_on(run(&steps, delivery));
        prop_assert_eq!(sent, seen);
    }
}
