//! Keys and values of the step into their pages.

use crate::attention::arguments::{Checked, DataType};
use crate::isa::Kernel;
use crate::simd::{Bf16, Element, F16, LANES, Simd};

/// Writes the keys and values of rows `start` to `stop - 1`.
#[derive(Clone, Copy)]
pub(super) struct Write<'a> {
    pub(super) call: &'a Checked<'a>,
    pub(super) start: usize,
    pub(super) stop: usize,
}

impl Kernel for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: the call is checked.
        unsafe {
            match (self.call.call.data_type, self.call.call.cache_type) {
                (DataType::F32, DataType::F32) => self.write::<S, f32, f32>(simd),
                (DataType::F32, DataType::Bf16) => self.write::<S, f32, Bf16>(simd),
                (DataType::F32, DataType::F16) => self.write::<S, f32, F16>(simd),
                (DataType::Bf16, DataType::F32) => self.write::<S, Bf16, f32>(simd),
                (DataType::Bf16, DataType::Bf16) => self.write::<S, Bf16, Bf16>(simd),
                (DataType::Bf16, DataType::F16) => self.write::<S, Bf16, F16>(simd),
                (DataType::F16, DataType::F32) => self.write::<S, F16, f32>(simd),
                (DataType::F16, DataType::Bf16) => self.write::<S, F16, Bf16>(simd),
                (DataType::F16, DataType::F16) => self.write::<S, F16, F16>(simd),
            }
        }
    }
}

impl Write<'_> {
    #[inline(always)]
    unsafe fn write<S: Simd, From: Element, To: Element>(self, simd: S) {
        let call = &self.call.call;
        let (key, value) = (call.key.address as *const From, call.value.address as *const From);
        let (keys, values) = (call.keys as *mut To, call.values as *mut To);
        let mut row = self.start;
        while row < self.stop {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
            let slot = |row: usize| self.call.slot_mapping[row] as usize;
            let (first, block, offset) = (slot(row), slot(row) / call.block_size, slot(row) % call.block_size);
            // Tokens beside each other in a page are written beside each other.
            let mut count = 1;
            while row + count < self.stop && offset + count < call.block_size && slot(row + count) == first + count {
                count += 1;
            }
            for head in 0..call.kv_heads {
                let page = block * call.kv_heads + head;
                // SAFETY: rows and slots are checked.
                unsafe {
                    let from = key.add(row * call.key.row + head * call.key.head);
                    let to = keys.add(page * call.head_dim * call.block_size + offset);
                    for dim in 0..call.head_dim {
                        for token in 0..count {
                            let element = from.add(token * call.key.row + dim).read();
                            to.add(dim * call.block_size + token).write(convert(element));
                        }
                    }
                    let from = value.add(row * call.value.row + head * call.value.head);
                    let to = values.add((page * call.block_size + offset) * call.value_dim);
                    for token in 0..count {
                        for dim in (0..call.value_dim).step_by(LANES) {
                            let lanes = simd.read(from.add(token * call.value.row + dim));
                            simd.write(to.add(token * call.value_dim + dim), lanes);
                        }
                    }
                }
            }
            row += count;
        }
    }
}

#[inline(always)]
fn convert<From: Element, To: Element>(element: From) -> To {
    To::from_f32(element.to_f32())
}
