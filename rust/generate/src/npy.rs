//! Routed experts as vLLM answers with them: a `.npy` file in base64.
//!
//! The file is numpy's format 1.0 (<https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>), byte for
//! byte what `numpy.save` writes.

use rollspan_protocol::RoutedExperts;

/// Magic, version 1.0.
const START: &[u8] = b"\x93NUMPY\x01\x00";
/// Bytes of the length of the header.
const LENGTH_BYTES: usize = 2;
/// The data begins at a multiple of this.
const ALIGNMENT: usize = 64;
/// numpy leaves room for a first dimension of so many digits.
const GROWTH_DIGITS: usize = 21;

/// The experts as the base64 of a `.npy` file.
pub(crate) fn encoded(experts: &RoutedExperts) -> String {
    let [tokens, layers, top_k] = experts.shape();
    let dtype = experts.dtype();
    let mut header =
        format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({tokens}, {layers}, {top_k}), }}");
    header.push_str(&" ".repeat(GROWTH_DIGITS.saturating_sub(tokens.to_string().len())));
    let unaligned = (START.len() + LENGTH_BYTES + header.len() + 1) % ALIGNMENT;
    header.push_str(&" ".repeat(ALIGNMENT - unaligned));
    header.push('\n');
    // Three numbers of at most 20 digits keep the header far below 64 KiB.
    let length = u16::try_from(header.len()).unwrap_or(u16::MAX);
    base64(&[START, &length.to_le_bytes(), header.as_bytes(), experts.data()].concat())
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let at = |index: usize| u32::from(group.get(index).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for place in 0..4 {
            let digit = ALPHABET[(bits >> (18 - 6 * place) & 63) as usize];
            text.push(if place > group.len() { '=' } else { char::from(digit) });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_is_that_of_the_rfc() {
        let examples = ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy"];
        for (length, expected) in examples.into_iter().enumerate() {
            assert_eq!(base64(&b"foobar"[..length]), expected);
        }
    }
}
