//! Values of any type: passed over, kept as their bytes, or read as JSON. Checked as strictly as the values that are read.

use std::marker::PhantomData;

use serde::de::{Deserializer, MapAccess, SeqAccess};
use serde_json::{Map, Value};

use crate::error::DecodeErrorKind as Kind;
use crate::fields::entries;
use crate::raw::RawValue;
use crate::source::Source;
use crate::wire::{Scalar, Wire, seed};

/// Any value.
pub(crate) struct Skipped;

impl Wire for Skipped {
    const EXPECTED: &'static str = "a value";

    fn scalar(_: Scalar<'_>) -> Result<Self, Kind> {
        Ok(Self)
    }

    fn array<'de, A: SeqAccess<'de>>(mut access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        while access.next_element_seed(seed::<Self>(source))?.is_some() {}
        Ok(Self)
    }

    fn map<'de, A: MapAccess<'de>>(mut access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        while access.next_entry_seed(seed::<Self>(source), seed::<Self>(source))?.is_some() {}
        Ok(Self)
    }
}

/// A map of anything.
pub(crate) struct AnyMap;

impl Wire for AnyMap {
    const EXPECTED: &'static str = "a map";

    fn map<'de, A: MapAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        Skipped::map(access, source).map(|_| Self)
    }
}

/// A value of type `T`, as its bytes.
pub(crate) struct Kept<T> {
    pub raw: RawValue,
    wire: PhantomData<T>,
}

impl<T: Wire> Wire for Kept<T> {
    const EXPECTED: &'static str = T::EXPECTED;

    fn read<'de, D: Deserializer<'de>, V>(
        deserializer: D,
        source: &Source<'_>,
        put: impl FnOnce(Self) -> V,
    ) -> Result<V, D::Error> {
        let start = source.position();
        T::read(deserializer, source, drop)?;
        Ok(put(Self { raw: RawValue::new(source.slice(start..source.position())), wire: PhantomData }))
    }
}

/// Any value that JSON has; floats that it has not become null.
impl Wire for Value {
    const EXPECTED: &'static str = "a value that JSON has";

    fn scalar(scalar: Scalar<'_>) -> Result<Self, Kind> {
        Ok(match scalar {
            Scalar::Nil => Self::Null,
            Scalar::Boolean(value) => value.into(),
            Scalar::Integer(value) => {
                u64::try_from(value).map_or_else(|_| i64::try_from(value).ok().into(), Self::from)
            }
            Scalar::Float(value) => value.into(),
            Scalar::Text(text) => text.into(),
            Scalar::Bytes | Scalar::ArrayData(_) => return Err(scalar.instead_of(Self::EXPECTED)),
        })
    }

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        Vec::array(access, source).map(Self::Array)
    }

    fn map<'de, A: MapAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let mut object = Map::new();
        entries(access, source, |key, entry| {
            object.insert(key.to_owned(), entry.read()?);
            Ok(())
        })?;
        Ok(Self::Object(object))
    }
}
