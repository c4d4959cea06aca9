//! MessagePack out: positional structs as arrays, other structs as maps, integers in their shortest form, floats as
//! float64.

use rmp_serde::MSGPACK_EXT_STRUCT_NAME;
use rmp_serde::config::{DefaultConfig, StructMapConfig};
use serde::{Serialize, Serializer};

use crate::raw::RawValue;
use crate::wire::ARRAY_EXTENSION;

/// Growing buffer of one payload. Writing into memory cannot fail, nor can the few types that come here.
pub(crate) struct Writer {
    serializer: rmp_serde::Serializer<Vec<u8>, StructMapConfig<DefaultConfig>>,
}

/// Bytes, which `serde` takes for a list of numbers unless told.
struct Bytes<'b>(&'b [u8]);

impl Serialize for Bytes<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

impl Writer {
    pub fn new() -> Self {
        Self { serializer: rmp_serde::Serializer::new(Vec::new()).with_struct_map() }
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.serializer.into_inner()
    }

    pub fn value(&mut self, value: impl Serialize) {
        let _written = value.serialize(&mut self.serializer);
    }

    pub fn nil(&mut self) {
        self.value(());
    }

    pub fn array(&mut self, elements: usize) {
        let _written = self.serializer.serialize_seq(Some(elements)).map(drop);
    }

    pub fn map(&mut self, entries: usize) {
        let _written = self.serializer.serialize_map(Some(entries)).map(drop);
    }

    pub fn entry(&mut self, key: &str, value: impl Serialize) {
        self.value(key);
        self.value(value);
    }

    /// Raw array bytes as an extension value.
    pub fn array_data(&mut self, data: &[u8]) {
        let value = (ARRAY_EXTENSION, Bytes(data));
        let _written = self.serializer.serialize_newtype_struct(MSGPACK_EXT_STRUCT_NAME, &value);
    }

    /// Values that another writer wrote.
    pub fn written(&mut self, other: Self) {
        self.serializer.get_mut().extend_from_slice(&other.into_bytes());
    }

    pub fn raw(&mut self, value: &RawValue) {
        self.serializer.get_mut().extend_from_slice(value.as_bytes());
    }

    /// The element of that name among those that are only passed on, or nil.
    pub fn kept(&mut self, other: &[(&'static str, RawValue)], name: &str) {
        self.optional(other.iter().find(|(other, _)| *other == name), |writer, (_, value)| writer.raw(value));
    }

    pub fn optional<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        match value {
            Some(value) => write(self, value),
            None => self.nil(),
        }
    }
}

/// Entries of a map that leaves out what equals its default.
pub(crate) struct Entries {
    writer: Writer,
    count: usize,
}

impl Entries {
    pub fn new() -> Self {
        Self { writer: Writer::new(), count: 0 }
    }

    /// Writes the map.
    pub fn finish(self, writer: &mut Writer) {
        writer.map(self.count);
        writer.written(self.writer);
    }

    pub fn entry(&mut self, name: &str, value: impl Serialize) {
        self.count += 1;
        self.writer.entry(name, value);
    }

    pub fn number<T: Serialize + PartialEq + Copy>(&mut self, name: &str, value: T, plain: T) {
        if value != plain {
            self.entry(name, value);
        }
    }

    pub fn float(&mut self, name: &str, value: f64, plain: f64) {
        if (value - plain).abs() > 0.0 {
            self.entry(name, value);
        }
    }

    pub fn some(&mut self, name: &str, value: Option<impl Serialize>) {
        if let Some(value) = value {
            self.entry(name, value);
        }
    }

    pub fn list<T: Serialize>(&mut self, name: &str, list: &[T]) {
        if !list.is_empty() {
            self.entry(name, list);
        }
    }
}
