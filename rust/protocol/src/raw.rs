//! Values that this crate passes on without looking into them.

use serde_json::Value;

use crate::decoded::decode;

/// One well-formed MessagePack value, as its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawValue(Box<[u8]>);

impl RawValue {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// The value's MessagePack bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The value as JSON; `None` when it holds bytes or arrays, which JSON has not.
    pub fn to_json(&self) -> Option<Value> {
        decode("RawValue", &self.0, &[]).ok().map(|decoded| decoded.value)
    }
}
