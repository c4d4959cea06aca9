//! Positional structs, which are arrays tolerant of shorter and of longer ones, and maps with string keys.

use serde::de::{MapAccess, SeqAccess};

use crate::raw::RawValue;
use crate::source::Source;
use crate::untyped::{Kept, Skipped};
use crate::wire::{Seed, Wire, seed};

/// The elements of an array that is being read as a struct, in the order of its fields.
pub(crate) struct Fields<'s, 'a, A> {
    access: A,
    source: &'s Source<'a>,
}

impl<'s, 'a, 'de, A: SeqAccess<'de>> Fields<'s, 'a, A> {
    pub fn new(access: A, source: &'s Source<'a>) -> Self {
        Self { access, source }
    }

    /// Reads the next element and puts it somewhere; gives whether it was there.
    #[inline]
    fn next<T: Wire>(&mut self, name: &'static str, put: impl FnOnce(T)) -> Result<bool, A::Error> {
        let found = self.access.next_element_seed(Seed::new(self.source, put));
        Ok(found.inspect_err(|_| self.source.at(name))?.is_some())
    }

    /// An element that must be there.
    pub fn required<T: Wire>(&mut self, name: &'static str) -> Result<T, A::Error> {
        let mut slot = None;
        self.next(name, |value| slot = Some(value))?;
        self.source.required(slot, name)
    }

    /// An element that keeps its default when the array ends before it.
    pub fn defaulted<T: Wire>(&mut self, name: &'static str, slot: &mut T) -> Result<(), A::Error> {
        self.next(name, |value| *slot = value).map(drop)
    }

    /// An element that is only passed on, unless it is nil or absent.
    pub fn kept<T: Wire>(
        &mut self,
        name: &'static str,
        other: &mut Vec<(&'static str, RawValue)>,
    ) -> Result<(), A::Error> {
        self.next(name, |value: Option<Kept<T>>| other.extend(value.map(|value| (name, value.raw)))).map(drop)
    }

    /// Passes over the elements behind the last known one and counts them.
    pub fn close(mut self) -> Result<(), A::Error> {
        while self.access.next_element_seed(seed::<Skipped>(self.source))?.is_some() {
            self.source.count_skipped();
        }
        Ok(())
    }
}

/// The value of a map's entry, not yet read.
pub(crate) struct Entry<'m, 's, 'a, A> {
    access: &'m mut A,
    source: &'s Source<'a>,
}

impl<'de, A: MapAccess<'de>> Entry<'_, '_, '_, A> {
    pub fn read<T: Wire>(self) -> Result<T, A::Error> {
        self.access.next_value_seed(seed(self.source))
    }

    pub fn skip(self) -> Result<(), A::Error> {
        self.read::<Skipped>().map(drop)
    }
}

/// Reads a map; `entry` reads or skips the value of each key.
pub(crate) fn entries<'s, 'a, 'de, A: MapAccess<'de>>(
    mut access: A,
    source: &'s Source<'a>,
    mut entry: impl FnMut(&str, Entry<'_, 's, 'a, A>) -> Result<(), A::Error>,
) -> Result<(), A::Error> {
    while let Some(key) = access.next_key_seed(seed::<String>(source))? {
        entry(&key, Entry { access: &mut access, source }).inspect_err(|_| source.at(&key))?;
    }
    Ok(())
}

/// A struct that is a map: keys that are only checked, by their types; keys that must be there; keys that have a default,
/// that of their type or another one. Unknown ones are ignored.
macro_rules! map_struct {
    ($type:ident: $(check $checked:ident: $check:ty,)* $(required $required:ident,)* $(defaulted $defaulted:ident,)*
        $(otherwise $otherwise:ident: $value:expr,)*) => {
        impl $crate::wire::Wire for $type {
            const EXPECTED: &'static str = "a map";

            fn map<'de, A: serde::de::MapAccess<'de>>(
                access: A,
                source: &$crate::source::Source<'_>,
            ) -> Result<Self, A::Error> {
                $(let mut $checked: Option<$check> = None;)*
                $(let mut $required = None;)*
                $(let mut $defaulted = Default::default();)*
                $(let mut $otherwise = $value.into();)*
                $crate::fields::entries(access, source, |key, entry| {
                    match key {
                        $(stringify!($checked) => $checked = Some(entry.read()?),)*
                        $(stringify!($required) => $required = Some(entry.read()?),)*
                        $(stringify!($defaulted) => $defaulted = entry.read()?,)*
                        $(stringify!($otherwise) => $otherwise = entry.read()?,)*
                        _ => entry.skip()?,
                    }
                    Ok(())
                })?;
                $(source.required($checked, stringify!($checked))?;)*
                Ok(Self { $($required: source.required($required, stringify!($required))?,)* $($defaulted,)* $($otherwise,)* })
            }
        }
    };
}
pub(crate) use map_struct;
