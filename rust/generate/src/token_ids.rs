//! The body's top level, read so that a long prompt costs four bytes a token.

use std::fmt;

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// The prompt as the client sent it, before the vocabulary is known.
#[derive(Debug, PartialEq)]
pub(crate) enum TokenIds {
    /// A list of integers that fit; maybe empty.
    Ids(Vec<u32>),
    /// A list whose element at `index` is none.
    Element {
        /// Integers in front of it.
        before: Vec<u32>,
        /// The first one that is none.
        value: Value,
    },
    /// No list.
    Other(Value),
}

/// A request body.
#[derive(Debug)]
pub(crate) enum Body {
    /// A JSON object: `token_ids`, and all other fields.
    Object { token_ids: Option<TokenIds>, fields: Map<String, Value> },
    /// Any other JSON value.
    Other,
}

impl<'de> Deserialize<'de> for Body {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(BodyVisitor)
    }
}

/// Answers every scalar with what `$convert` makes of it.
macro_rules! scalars {
    ($convert:expr) => {
        fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
            Ok($convert(value.into()))
        }
        fn visit_i64<E>(self, value: i64) -> Result<Self::Value, E> {
            Ok($convert(value.into()))
        }
        fn visit_f64<E>(self, value: f64) -> Result<Self::Value, E> {
            Ok($convert(value.into()))
        }
        fn visit_str<E>(self, value: &str) -> Result<Self::Value, E> {
            Ok($convert(value.into()))
        }
        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok($convert(Value::Null))
        }
    };
}

struct BodyVisitor;

impl<'de> Visitor<'de> for BodyVisitor {
    type Value = Body;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    scalars!(|_: Value| Body::Other);

    fn visit_u64<E>(self, _: u64) -> Result<Body, E> {
        Ok(Body::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, sequence: A) -> Result<Body, A::Error> {
        Value::deserialize(SeqAccessDeserializer::new(sequence)).map(|_| Body::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
        let mut token_ids = None;
        let mut fields = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if key == "token_ids" {
                token_ids = Some(map.next_value_seed(TokenIdsVisitor)?);
            } else {
                fields.insert(key, map.next_value()?);
            }
        }
        Ok(Body::Object { token_ids, fields })
    }
}

struct TokenIdsVisitor;

impl<'de> DeserializeSeed<'de> for TokenIdsVisitor {
    type Value = TokenIds;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<TokenIds, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TokenIdsVisitor {
    type Value = TokenIds;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    scalars!(TokenIds::Other);

    fn visit_u64<E>(self, value: u64) -> Result<TokenIds, E> {
        Ok(TokenIds::Other(value.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<TokenIds, A::Error> {
        Value::deserialize(MapAccessDeserializer::new(map)).map(TokenIds::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<TokenIds, A::Error> {
        let mut before = Vec::new();
        while let Some(other) = sequence.next_element_seed(ElementVisitor(&mut before))? {
            if let Some(value) = other {
                // The rest is read for its syntax only.
                while sequence.next_element::<Value>()?.is_some() {}
                return Ok(TokenIds::Element { before, value: *value });
            }
        }
        Ok(TokenIds::Ids(before))
    }
}

/// Appends an element that is a token id, and gives back any other; boxed, as nearly all are token ids.
struct ElementVisitor<'a>(&'a mut Vec<u32>);

impl<'de> DeserializeSeed<'de> for ElementVisitor<'_> {
    type Value = Option<Box<Value>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ElementVisitor<'_> {
    type Value = Option<Box<Value>>;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    scalars!(|value: Value| Some(Box::new(value)));

    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        match u32::try_from(value) {
            Ok(id) => self.0.push(id),
            Err(_) => return Ok(Some(Box::new(value.into()))),
        }
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, sequence: A) -> Result<Self::Value, A::Error> {
        Value::deserialize(SeqAccessDeserializer::new(sequence)).map(|value| Some(Box::new(value)))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        Value::deserialize(MapAccessDeserializer::new(map)).map(|value| Some(Box::new(value)))
    }
}
