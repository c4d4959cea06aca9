//! Sampling: known draws, plain answers, and the same bits with every instruction set.

use rollspan_kernels::isa::Isa;
use rollspan_kernels::sampling::{Job, Outcome, Row, sample_rows, score_rows};

const COLUMNS: usize = 4;

const PLAIN: Row = Row {
    scores: 0,
    reported: 0,
    seed: 0,
    position: 0,
    temperature: 1.0,
    top_p: 1.0,
    min_p: 0.0,
    top_k: 0,
    num_top: 3,
    scores_kind: 0,
    reported_kind: 0,
    padding: 0,
};

struct Results {
    outcomes: Vec<Outcome>,
    ids: Vec<i32>,
    logprobs: Vec<f32>,
}

/// Rows that all sample from, and report on, the same logits.
fn run(logits: &[f32], rows: &[Row], targets: Option<i64>) -> Results {
    let address = logits.as_ptr() as u64;
    let rows: Vec<Row> = rows.iter().map(|row| Row { scores: address, reported: address, ..*row }).collect();
    let outcome = Outcome { token: targets.unwrap_or(0), ..Outcome::default() };
    let mut results = Results {
        outcomes: vec![outcome; rows.len()],
        ids: vec![-1; rows.len() * COLUMNS],
        logprobs: vec![0.0; rows.len() * COLUMNS],
    };
    let job = Job {
        rows: rows.as_ptr(),
        outcomes: results.outcomes.as_mut_ptr(),
        ids: results.ids.as_mut_ptr(),
        logprobs: results.logprobs.as_mut_ptr(),
        count: rows.len(),
        vocabulary: logits.len(),
        columns: COLUMNS,
    };
    // SAFETY: all of it lives in this function.
    #[expect(unsafe_code, reason = "the kernel takes addresses")]
    unsafe {
        if targets.is_some() {
            score_rows(&job);
        } else {
            sample_rows(&job, false);
        }
    }
    results
}

/// Some logits between -8 and 8 in steps of 1/8, with ties.
fn logits(count: u32) -> Vec<f32> {
    (0..count).map(|i| f32::from((i.wrapping_mul(2_654_435_761) >> 25) as u8) / 8.0 - 8.0).collect()
}

#[test]
fn draws_are_those_of_the_python_side() {
    let draw = |seed, position| Row { seed, position, ..PLAIN }.draw();
    // What tests/unit/engine/test_engine_sampler.py pins as 0.65244… and 0.60423…, in units of 2^-53.
    assert_eq!((draw(0, 0), draw(7, 3)), (5_876_733_520_225_071, 5_442_463_288_602_051));
}

#[test]
fn equal_logits_are_drawn_by_the_leading_bits() {
    let rows: Vec<Row> = (0..200).map(|seed| Row { seed, position: 5, ..PLAIN }).collect();
    let results = run(&[0.5; 1024], &rows, None);
    for (row, outcome) in rows.iter().zip(&results.outcomes) {
        assert_eq!((outcome.token, outcome.valid, outcome.rank), ((row.draw() >> 43).cast_signed(), 1, 1));
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    let logits = logits(3001);
    let rows: Vec<Row> = (0..60)
        .map(|i: u64| Row {
            seed: i,
            temperature: [0.0, 0.7, 1.0][(i % 3) as usize],
            top_k: [0, 40, 0, 2000][(i % 4) as usize],
            top_p: [1.0, 0.9, 0.3][(i / 3 % 3) as usize],
            min_p: [0.0, 0.05][(i / 2 % 2) as usize],
            ..PLAIN
        })
        .collect();
    let all = |isa: Isa| {
        isa.activate().then(|| {
            let (drawn, scored) = (run(&logits, &rows, None), run(&logits, &rows, Some(77)));
            let bits = |results: &Results| results.logprobs.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let tokens: Vec<_> = drawn.outcomes.iter().map(|o| (o.token, o.rank, o.valid)).collect();
            (tokens, bits(&drawn), bits(&scored), drawn.ids, scored.ids)
        })
    };
    let portable = all(Isa::Portable);
    for isa in [Isa::Avx2, Isa::Avx512] {
        if let Some(found) = all(isa) {
            assert_eq!(Some(found), portable, "{}", isa.name());
        }
    }
    assert!(Isa::best().activate());
}

#[test]
fn the_best_tokens_come_in_order_and_ties_by_id() {
    let mut logits = vec![0.0; 900];
    logits[800] = 2.0;
    logits[13] = 1.0;
    logits[500] = 1.0;
    let results = run(&logits, &[Row { temperature: 0.0, ..PLAIN }], None);
    assert_eq!(results.ids, [800, 800, 13, 500]);
    assert_eq!(results.logprobs[0].to_bits(), results.logprobs[1].to_bits());
    assert!((results.logprobs[1] - results.logprobs[2] - 1.0).abs() < 1e-6);
    let scored = run(&logits, &[PLAIN], Some(500));
    assert_eq!((scored.outcomes[0].rank, scored.ids[0]), (2, 500));
    assert_eq!(scored.logprobs[0].to_bits(), scored.logprobs[3].to_bits());
}

#[test]
fn rows_that_are_not_finite_are_invalid() {
    for bad in [f32::NAN, f32::INFINITY] {
        for place in [0, 255, 256, 299] {
            let mut logits = logits(300);
            logits[place] = bad;
            assert_eq!(run(&logits, &[PLAIN], None).outcomes[0].valid, 0);
            assert_eq!(run(&logits, &[PLAIN], Some(3)).outcomes[0].valid, 0);
        }
    }
    assert_eq!(run(&[f32::NEG_INFINITY; 40], &[PLAIN], None).outcomes[0].valid, 0);
    assert_eq!(run(&[1e36; 40], &[Row { temperature: 1e-4, ..PLAIN }], None).outcomes[0].valid, 0);
}
