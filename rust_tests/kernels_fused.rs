//! The fused kernels against their formulas in double precision, and with the same bits on every instruction set.

#![allow(unsafe_code, reason = "kernels take addresses")]
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_precision_loss)]

use std::sync::Mutex;

use rollspan_kernels::fused::{Activation, Gated, Heads, Linear, Norm, Rotary, Scaling, Type, Weight};
use rollspan_kernels::isa::Isa;
use rollspan_kernels::simd::{Bf16, Element};

/// The instruction set is the process's.
static ISA: Mutex<()> = Mutex::new(());

/// Numbers in [-2, 2) from a counter.
fn numbers(n: usize, seed: u64) -> Vec<f32> {
    (0..n as u64)
        .map(|i| {
            let mixed = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed.wrapping_mul(0x2545_f491_4f6c_dd1d));
            ((mixed >> 40) as f32 / 16_777_216.0 - 0.5) * 4.0
        })
        .collect()
}

/// What `compute` fills `n` floats with, on each instruction set: all the same.
fn everywhere(n: usize, compute: impl Fn(&mut [f32])) -> Vec<f32> {
    let _held = ISA.lock().unwrap();
    let mut results: Vec<Vec<f32>> = Vec::new();
    for isa in Isa::ALL {
        if isa.activate() {
            let mut output = vec![0.0; n];
            compute(&mut output);
            results.push(output);
        }
    }
    assert!(Isa::best().activate());
    for other in &results[1..] {
        assert!(other.iter().zip(&results[0]).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
    results.swap_remove(0)
}

fn close(found: f32, expected: f64) {
    assert!((f64::from(found) - expected).abs() <= 2e-6 * expected.abs().max(1.0), "{found} is not {expected}");
}

#[test]
fn a_norm_scales_rows_of_any_length_and_keeps_the_sum() {
    for columns in [1, 15, 16, 33, 64, 200] {
        let rows = 3;
        let (x, y, weight) = (numbers(rows * columns, 1), numbers(rows * columns, 2), numbers(columns, 3));
        for scaling in [Scaling::None, Scaling::Rounded, Scaling::Weight, Scaling::OnePlus] {
            let mut sum = vec![0.0_f32; rows * columns];
            let sum_address = sum.as_mut_ptr() as usize;
            let output = everywhere(rows * columns, |output| {
                let norm = Norm {
                    rows,
                    columns,
                    input: (x.as_ptr() as usize, columns),
                    addend: (y.as_ptr() as usize, columns),
                    sum: sum_address,
                    weight: weight.as_ptr() as usize,
                    scaling,
                    epsilon: 1e-6,
                    output: output.as_mut_ptr() as usize,
                };
                // SAFETY: the buffers are as long as the fields say.
                unsafe { norm.run(Type::F32) };
            });
            for row in 0..rows {
                let range = row * columns..(row + 1) * columns;
                let total: Vec<f64> =
                    x[range.clone()].iter().zip(&y[range.clone()]).map(|(a, b)| f64::from(a + b)).collect();
                let mean = total.iter().map(|a| a * a).sum::<f64>() / columns as f64;
                for (i, &a) in total.iter().enumerate() {
                    let factor = match scaling {
                        Scaling::None => 1.0,
                        Scaling::OnePlus => 1.0 + f64::from(weight[i]),
                        _ => f64::from(weight[i]),
                    };
                    close(sum[range.start + i], a);
                    close(output[range.start + i], a / (mean + 1e-6).sqrt() * factor);
                }
            }
        }
    }
}

#[test]
fn a_gate_is_activated_and_multiplied() {
    let (rows, columns) = (3, 37);
    let x = numbers(rows * 2 * columns, 4);
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let output = everywhere(rows * columns, |output| {
            let gated = Gated {
                rows,
                columns,
                gate: (x.as_ptr() as usize, 2 * columns),
                up: (x[columns..].as_ptr() as usize, 2 * columns),
                activation,
                output: output.as_mut_ptr() as usize,
            };
            // SAFETY: the buffers are as long as the fields say.
            unsafe { gated.run(Type::F32) };
        });
        for (i, &found) in output.iter().enumerate() {
            let at = i / columns * 2 * columns + i % columns;
            let (gate, up) = (f64::from(x[at]), f64::from(x[at + columns]));
            let active = match activation {
                Activation::Silu => gate / (1.0 + (-gate).exp()),
                Activation::GeluTanh => {
                    0.5 * gate
                        * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (gate + 0.044_715 * gate.powi(3))).tanh())
                }
            };
            close(found, active * up);
        }
    }
}

#[test]
fn heads_are_turned_in_place_and_other_columns_stay() {
    for head_dim in [2, 32, 40] {
        let (rows, heads, stride) = (3, 2, 2 * head_dim + 5);
        let (x, cos, sin) = (numbers(rows * stride, 5), numbers(rows * head_dim, 6), numbers(rows * head_dim, 7));
        let output = everywhere(rows * stride, |output| {
            output.copy_from_slice(&x);
            let place = (output.as_mut_ptr() as usize, stride);
            let tensor = Heads { heads, input: place, output: place, weight: 0, scaling: Scaling::None };
            let rotary = Rotary {
                rows,
                head_dim,
                tensors: [tensor, Heads { heads: 0, ..tensor }],
                cos: (cos.as_ptr() as usize, head_dim),
                sin: (sin.as_ptr() as usize, head_dim),
                epsilon: 0.0,
            };
            // SAFETY: the buffers are as long as the fields say.
            unsafe { rotary.run(Type::F32) };
        });
        let half = head_dim / 2;
        for row in 0..rows {
            for column in 0..stride {
                let at = row * stride + column;
                if column >= heads * head_dim {
                    assert_eq!(output[at].to_bits(), x[at].to_bits());
                    continue;
                }
                let i = column % head_dim;
                let turned = if i < half { -x[at + half] } else { x[at - half] };
                close(output[at], f64::from(x[at] * cos[row * head_dim + i] + turned * sin[row * head_dim + i]));
            }
        }
    }
}

#[test]
fn few_rows_are_multiplied_by_several_weights() {
    if !Linear::is_available() {
        return;
    }
    for (rows, depth) in [(1, 32), (1, 100), (2, 64), (3, 31), (5, 96), (8, 40)] {
        let outputs = [5, 1, 9];
        let bf16 = |n, seed| numbers(n, seed).into_iter().map(Bf16::from_f32).collect::<Vec<_>>();
        let input = bf16(rows * depth, 8);
        let matrices: Vec<_> = outputs.iter().map(|n| bf16(n * depth, *n as u64)).collect();
        let bias = bf16(5, 9);
        let weights: Vec<_> = matrices
            .iter()
            .zip(outputs)
            .map(|(matrix, n)| Weight {
                address: matrix.as_ptr() as usize,
                outputs: n,
                bias: if n == 5 { bias.as_ptr() as usize } else { 0 },
            })
            .collect();
        let mut output = vec![Bf16::default(); rows * 15];
        let linear = Linear {
            rows,
            depth,
            input: (input.as_ptr() as usize, depth),
            weights: &weights,
            output: output.as_mut_ptr() as usize,
        };
        // SAFETY: the buffers are as long as the fields say.
        assert!(unsafe { linear.run() });
        for row in 0..rows {
            let mut column = 0;
            for (matrix, n) in matrices.iter().zip(outputs) {
                for i in 0..n {
                    let products = (0..depth).map(|k| {
                        f64::from(input[row * depth + k].to_f32()) * f64::from(matrix[i * depth + k].to_f32())
                    });
                    let expected = products.sum::<f64>() + if n == 5 { f64::from(bias[i].to_f32()) } else { 0.0 };
                    let found = f64::from(output[row * 15 + column].to_f32());
                    assert!((found - expected).abs() <= expected.abs() / 256.0 + 1e-4, "{found} is not {expected}");
                    column += 1;
                }
            }
        }
    }
}
