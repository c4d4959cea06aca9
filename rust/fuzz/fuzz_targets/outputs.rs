//! Messages of an engine: whatever comes in, the decoder answers, and what it accepts survives a round trip.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rollspan_protocol::{Dead, EngineHello, decode_outputs, recover_request_ids};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(decoded) = decode_outputs(&[bytes]) {
        let again = decode_outputs(&[&decoded.value.encode()]).expect("what was decoded can be encoded");
        assert_eq!(again.skipped_fields, 0);
    }
    let _outcomes = (EngineHello::decode(bytes), Dead::decode(bytes));
    recover_request_ids(&[bytes]);
});
