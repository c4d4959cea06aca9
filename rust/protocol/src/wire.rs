//! Values that are read strictly: what each type takes is listed, and everything else is refused.

use std::convert::identity;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::DecodeErrorKind as Kind;
use crate::source::Source;

/// Extension type of raw array bytes; all others are refused.
pub(crate) const ARRAY_EXTENSION: i8 = 3;

/// Most bytes that are allocated for a list before its elements come.
const CAUTIOUS_BYTES: usize = 1 << 20;

/// A value that is neither an array nor a map.
pub(crate) enum Scalar<'v> {
    Nil,
    Boolean(bool),
    Integer(i128),
    Float(f64),
    Text(&'v str),
    Bytes,
    /// Where the data of an extension of type [`ARRAY_EXTENSION`] is.
    ArrayData(Range<usize>),
}

impl Scalar<'_> {
    /// The refusal of a value that is not of the field's type.
    pub fn instead_of(self, expected: &'static str) -> Kind {
        let found = match self {
            Self::Nil => "nil",
            Self::Boolean(_) => "a boolean",
            Self::Integer(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Text(_) => "a string",
            Self::Bytes => "bytes",
            Self::ArrayData(_) => "an extension type",
        };
        Kind::WrongType { expected, found }
    }
}

/// A type of the link. What it does not override is refused.
pub(crate) trait Wire: Sized {
    /// In words.
    const EXPECTED: &'static str;

    fn scalar(scalar: Scalar<'_>) -> Result<Self, Kind> {
        Err(scalar.instead_of(Self::EXPECTED))
    }

    fn array<'de, A: SeqAccess<'de>>(_: A, source: &Source<'_>) -> Result<Self, A::Error> {
        Err(source.refuse(Kind::WrongType { expected: Self::EXPECTED, found: "an array" }))
    }

    fn map<'de, A: MapAccess<'de>>(_: A, source: &Source<'_>) -> Result<Self, A::Error> {
        Err(source.refuse(Kind::WrongType { expected: Self::EXPECTED, found: "a map" }))
    }

    /// Reads a value and puts it where it belongs, as large ones are better not handed up through `serde`.
    #[inline]
    fn read<'de, D: Deserializer<'de>, V>(
        deserializer: D,
        source: &Source<'_>,
        put: impl FnOnce(Self) -> V,
    ) -> Result<V, D::Error> {
        let marker = source.rest().first().copied();
        deserializer.deserialize_any(Strict { source, marker, put, wire: PhantomData })
    }
}

/// Reads a [`Wire`] from wherever `serde` has one, and puts it somewhere.
pub(crate) struct Seed<'s, 'a, T, F> {
    source: &'s Source<'a>,
    put: F,
    wire: PhantomData<T>,
}

impl<'s, 'a, T, V, F: FnOnce(T) -> V> Seed<'s, 'a, T, F> {
    pub fn new(source: &'s Source<'a>, put: F) -> Self {
        Self { source, put, wire: PhantomData }
    }
}

/// Reads a value and gives it.
pub(crate) fn seed<'s, 'a, T>(source: &'s Source<'a>) -> Seed<'s, 'a, T, impl FnOnce(T) -> T> {
    Seed::new(source, identity)
}

impl<'de, T: Wire, V, F: FnOnce(T) -> V> DeserializeSeed<'de> for Seed<'_, '_, T, F> {
    type Value = V;

    #[inline]
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<V, D::Error> {
        T::read(deserializer, self.source, self.put)
    }
}

/// The one visitor: hands each value to its type.
struct Strict<'s, 'a, T, F> {
    source: &'s Source<'a>,
    /// First byte of the value.
    marker: Option<u8>,
    put: F,
    wire: PhantomData<T>,
}

impl<T: Wire, V, F: FnOnce(T) -> V> Strict<'_, '_, T, F> {
    #[inline]
    fn scalar<E: serde::de::Error>(self, scalar: Scalar<'_>) -> Result<V, E> {
        T::scalar(scalar).map(self.put).map_err(|kind| self.source.refuse(kind))
    }
}

impl<'de, T: Wire, V, F: FnOnce(T) -> V> Visitor<'de> for Strict<'_, '_, T, F> {
    type Value = V;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(T::EXPECTED)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<V, E> {
        self.scalar(Scalar::Nil)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<V, E> {
        self.scalar(Scalar::Boolean(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<V, E> {
        self.scalar(Scalar::Integer(value.into()))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<V, E> {
        self.scalar(Scalar::Integer(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<V, E> {
        self.scalar(Scalar::Float(value))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<V, E> {
        self.scalar(Scalar::Text(value))
    }

    fn visit_bytes<E: serde::de::Error>(self, _: &[u8]) -> Result<V, E> {
        // `rmp-serde` offers text that is not UTF-8 as bytes too, and reports it when that is declined.
        match self.marker {
            Some(0xc4..=0xc6) => self.scalar(Scalar::Bytes),
            _ => Err(E::custom("text that is not UTF-8")),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, access: A) -> Result<V, A::Error> {
        T::array(access, self.source).map(self.put)
    }

    fn visit_map<A: MapAccess<'de>>(self, access: A) -> Result<V, A::Error> {
        T::map(access, self.source).map(self.put)
    }

    /// An extension value.
    fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<V, D::Error> {
        let data = deserializer.deserialize_any(Extension(self.source))?;
        self.scalar(Scalar::ArrayData(data))
    }
}

struct Extension<'s, 'a>(&'s Source<'a>);

impl<'de> Visitor<'de> for Extension<'_, '_> {
    type Value = Range<usize>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an extension type")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Range<usize>, A::Error> {
        match access.next_element::<i8>()? {
            Some(ARRAY_EXTENSION) => {}
            other => return Err(self.0.refuse(Kind::RefusedExtension(other.unwrap_or_default()))),
        }
        let start = self.0.position();
        access.next_element::<IgnoredAny>()?;
        Ok(start..self.0.position())
    }
}

/// Types of one scalar: `type, "in words": pattern => value` in as many patterns as it takes.
macro_rules! scalars {
    ($($type:ty, $expected:literal: $($pattern:pat => $value:expr),+;)+) => {$(
        impl $crate::wire::Wire for $type {
            const EXPECTED: &'static str = $expected;

            #[inline]
            fn scalar(scalar: $crate::wire::Scalar<'_>) -> Result<Self, $crate::error::DecodeErrorKind> {
                match scalar {
                    $($pattern => Ok($value),)+
                    other => Err(other.instead_of($expected)),
                }
            }
        }
    )+};
}
pub(crate) use scalars;

/// A finite float that a 32-bit float can hold (in range; precision is kept).
pub(crate) struct InF32Range(pub f64);

/// The integer in the range of its field.
pub(crate) fn in_range<T: TryFrom<i128>>(value: i128, range: &'static str) -> Result<T, Kind> {
    T::try_from(value).map_err(|_| Kind::OutOfRange(range))
}

/// As senders that write 1 for 1.0 exist.
#[expect(clippy::cast_precision_loss, reason = "that is what a float field holds")]
fn float(value: i128) -> f64 {
    value as f64
}

fn in_f32_range(value: f64) -> Result<InF32Range, Kind> {
    let fits = value.is_finite() && value.abs() <= f64::from(f32::MAX);
    if fits { Ok(InF32Range(value)) } else { Err(Kind::OutOfRange("a finite 32-bit float")) }
}

scalars! {
    bool, "a boolean": Scalar::Boolean(value) => value;
    u32, "an integer": Scalar::Integer(value) => in_range(value, "an unsigned 32-bit integer")?;
    u64, "an integer": Scalar::Integer(value) => in_range(value, "an unsigned 64-bit integer")?;
    i64, "an integer": Scalar::Integer(value) => in_range(value, "a signed 64-bit integer")?;
    f64, "a float": Scalar::Float(value) => value, Scalar::Integer(value) => float(value);
    InF32Range, "a float": Scalar::Float(value) => in_f32_range(value)?, Scalar::Integer(value) => Self(float(value));
    String, "a string": Scalar::Text(text) => text.to_owned();
    Arc<str>, "a string": Scalar::Text(text) => text.into();
}

/// A value or nil.
impl<T: Wire> Wire for Option<T> {
    const EXPECTED: &'static str = T::EXPECTED;

    #[inline]
    fn read<'de, D: Deserializer<'de>, V>(
        deserializer: D,
        source: &Source<'_>,
        put: impl FnOnce(Self) -> V,
    ) -> Result<V, D::Error> {
        if source.nil() { Ok(put(None)) } else { T::read(deserializer, source, |value| put(Some(value))) }
    }
}

impl<T: Wire> Wire for Vec<T> {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(mut access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let most = CAUTIOUS_BYTES / size_of::<T>().max(1);
        let mut list = Self::with_capacity(access.size_hint().unwrap_or(0).min(most));
        loop {
            let index = list.len();
            match access.next_element_seed(Seed::new(source, |element| list.push(element))) {
                Ok(Some(())) => {}
                Ok(None) => return Ok(list),
                Err(error) => {
                    source.at(&format!("[{index}]"));
                    return Err(error);
                }
            }
        }
    }
}
