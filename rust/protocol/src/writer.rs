//! MessagePack out: positional structs as arrays, everything else in its shortest form, floats as float64.

use std::convert::Infallible;

use rmp::encode::{self, ByteBuf, ValueWriteError};
use serde_json::Value;

use crate::raw::RawValue;
use crate::reader::ARRAY_EXTENSION;

/// Growing buffer of one payload.
#[derive(Default)]
pub(crate) struct Writer {
    buffer: ByteBuf,
}

/// Writing into memory cannot fail.
fn written<T>(result: Result<T, ValueWriteError<Infallible>>) -> T {
    match result {
        Ok(value) => value,
        Err(ValueWriteError::InvalidMarkerWrite(never) | ValueWriteError::InvalidDataWrite(never)) => match never {},
    }
}

/// Lengths are those of values in memory and of frames of at most 256 MiB: 32 bits hold them.
fn length(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

impl Writer {
    pub fn into_bytes(self) -> Vec<u8> {
        self.buffer.into_vec()
    }

    pub fn nil(&mut self) {
        match encode::write_nil(&mut self.buffer) {
            Ok(()) => {}
            Err(never) => match never {},
        }
    }

    pub fn boolean(&mut self, value: bool) {
        match encode::write_bool(&mut self.buffer, value) {
            Ok(()) => {}
            Err(never) => match never {},
        }
    }

    pub fn u64(&mut self, value: u64) {
        written(encode::write_uint(&mut self.buffer, value));
    }

    pub fn i64(&mut self, value: i64) {
        written(encode::write_sint(&mut self.buffer, value));
    }

    pub fn f64(&mut self, value: f64) {
        written(encode::write_f64(&mut self.buffer, value));
    }

    pub fn text(&mut self, value: &str) {
        written(encode::write_str(&mut self.buffer, value));
    }

    pub fn array(&mut self, elements: usize) {
        written(encode::write_array_len(&mut self.buffer, length(elements)));
    }

    pub fn map(&mut self, entries: usize) {
        written(encode::write_map_len(&mut self.buffer, length(entries)));
    }

    /// Raw array bytes as an extension value of type 3.
    pub fn array_data(&mut self, data: &[u8]) {
        written(encode::write_ext_meta(&mut self.buffer, length(data.len()), ARRAY_EXTENSION));
        self.buffer.as_mut_vec().extend_from_slice(data);
    }

    pub fn raw(&mut self, value: &RawValue) {
        self.buffer.as_mut_vec().extend_from_slice(value.as_bytes());
    }

    pub fn optional<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        match value {
            Some(value) => write(self, value),
            None => self.nil(),
        }
    }

    pub fn token_ids(&mut self, ids: &[u32]) {
        self.array(ids.len());
        for id in ids {
            self.u64((*id).into());
        }
    }

    pub fn texts<S: AsRef<str>>(&mut self, texts: &[S]) {
        self.array(texts.len());
        for text in texts {
            self.text(text.as_ref());
        }
    }

    pub fn json(&mut self, value: &Value) {
        match value {
            Value::Null => self.nil(),
            Value::Bool(value) => self.boolean(*value),
            Value::String(value) => self.text(value),
            Value::Number(value) => match (value.as_u64(), value.as_i64()) {
                (Some(value), _) => self.u64(value),
                (_, Some(value)) => self.i64(value),
                _ => self.optional(value.as_f64(), Self::f64),
            },
            Value::Array(values) => {
                self.array(values.len());
                for value in values {
                    self.json(value);
                }
            }
            Value::Object(entries) => {
                self.map(entries.len());
                for (key, value) in entries {
                    self.text(key);
                    self.json(value);
                }
            }
        }
    }
}
