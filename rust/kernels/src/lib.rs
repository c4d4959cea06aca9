//! Compute kernels on raw memory: paged attention, sampling, fused elementwise operations.
//!
//! Each kernel is written once, generic over [`simd::Simd`], and compiled for AVX-512, for AVX2 and portably; the
//! instruction set is chosen at run time ([`isa`]). All three give the same bits: the order of every operation is fixed,
//! fused multiply-adds are explicit and [`simd::Simd::exp`] is our own. Work is shared out by [`pool`], whose thread
//! count never changes a result.

#![allow(unsafe_code, reason = "kernels read and write tensors through raw pointers, with SIMD intrinsics")]
#![allow(clippy::inline_always, reason = "only what is inlined into it is compiled with a kernel's CPU features")]
#![allow(clippy::cast_ptr_alignment, reason = "the intrinsics that take these pointers need no alignment")]
#![allow(clippy::needless_range_loop, reason = "loops of constant length over several arrays of registers at once")]
#![allow(clippy::wrong_self_convention, reason = "a token is self wherever vectors are made")]
// Short names are those of the formulas; vectors of one name in several widths are what this crate is about.
#![allow(clippy::many_single_char_names, clippy::similar_names)]
// A token that proves the CPU's features has to be passed on by value.
#![allow(clippy::trivially_copy_pass_by_ref)]

pub mod attention;
pub mod fused;
pub mod isa;
pub mod pool;
pub mod sampling;
pub mod simd;
