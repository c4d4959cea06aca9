//! The instruction set that kernels run with.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::simd::{Portable, Simd};

/// An instruction set that every kernel is compiled for. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Isa {
    /// Plain Rust: any CPU.
    Portable = 1,
    /// AVX2 with FMA and F16C.
    Avx2 = 2,
    /// AVX-512 F, BW, DQ and VL.
    Avx512 = 3,
}

/// A kernel: one piece of work, written once for every instruction set.
///
/// `run` and everything generic that it calls must be `#[inline(always)]`: only then is it compiled with the features
/// of the instruction set. No closures around vector operations, for the same reason.
pub trait Kernel {
    /// What it gives.
    type Output;

    /// Does the work with the vectors of `simd`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// 0: not chosen yet.
static ACTIVE: AtomicU8 = AtomicU8::new(0);

impl Isa {
    /// All of them, the best first.
    pub const ALL: [Self; 3] = [Self::Avx512, Self::Avx2, Self::Portable];

    /// `avx512`, `avx2` or `portable`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Avx512 => "avx512",
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }

    /// The one of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|isa| isa.name() == name)
    }

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = || {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            };
            let avx512 = || {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            };
            match self {
                Self::Avx512 => avx2() && avx512(),
                Self::Avx2 => avx2(),
                Self::Portable => true,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Self::Portable
        }
    }

    /// The best one of this CPU.
    pub fn best() -> Self {
        Self::ALL.into_iter().find(|isa| isa.is_available()).unwrap_or(Self::Portable)
    }

    /// The one in use: the best, unless [`Isa::activate`] said otherwise.
    pub fn active() -> Self {
        match ACTIVE.load(Ordering::Relaxed) {
            1 => Self::Portable,
            2 => Self::Avx2,
            3 => Self::Avx512,
            _ => {
                let best = Self::best();
                ACTIVE.store(best as u8, Ordering::Relaxed);
                best
            }
        }
    }

    /// Uses this one from now on; false, and no change, where the CPU lacks it.
    pub fn activate(self) -> bool {
        let available = self.is_available();
        if available {
            ACTIVE.store(self as u8, Ordering::Relaxed);
        }
        available
    }

    /// Runs `kernel`, compiled for this instruction set (portably where the CPU lacks it).
    pub fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[cfg(target_arch = "x86_64")]
        {
            use crate::simd::{Avx2, Avx512};
            match self {
                Self::Avx512 => {
                    if let Some(simd) = Avx512::detect() {
                        // SAFETY: the token says that the CPU has the features.
                        return unsafe { run_avx512(kernel, simd) };
                    }
                }
                Self::Avx2 => {
                    if let Some(simd) = Avx2::detect() {
                        // SAFETY: as above.
                        return unsafe { run_avx2(kernel, simd) };
                    }
                }
                Self::Portable => {}
            }
        }
        kernel.run(Portable)
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn run_avx512<K: Kernel>(kernel: K, simd: crate::simd::Avx512) -> K::Output {
    kernel.run(simd)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<K: Kernel>(kernel: K, simd: crate::simd::Avx2) -> K::Output {
    kernel.run(simd)
}
