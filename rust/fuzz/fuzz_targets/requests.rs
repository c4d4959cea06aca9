//! Messages of a frontend, and frames: whatever comes in, the decoder answers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rollspan_protocol::{ClientHello, EngineCoreRequest, UtilityRequest, decode_abort, split_frame};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(decoded) = EngineCoreRequest::decode(bytes) {
        EngineCoreRequest::decode(&decoded.value.encode()).expect("what was decoded can be encoded");
    }
    if let Ok(decoded) = UtilityRequest::decode(bytes) {
        UtilityRequest::decode(&decoded.value.encode()).expect("what was decoded can be encoded");
    }
    let _outcomes = (decode_abort(bytes), ClientHello::decode(bytes), split_frame(bytes, 1 << 16));
});
