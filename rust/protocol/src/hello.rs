//! The first frame of each side, and the last one of a failing engine.

use serde::Serialize;
use serde::de::SeqAccess;

use crate::decoded::{Decoded, Result as DecodeResult, decode};
use crate::error::DecodeErrorKind as Kind;
use crate::facts::{Limits, ModelFacts};
use crate::fields::map_struct;
use crate::source::Source;
use crate::wire::{Scalar, Wire, scalars};
use crate::writer::Writer;

/// First entry of both hellos.
pub const MAGIC: &str = "rollspan";

/// Version of the protocol that this crate speaks: major, minor.
pub const VERSION: [u64; 2] = [1, 0];

/// The role of a frontend.
const ROLE: &str = "frontend";

/// State of the weights of engines that don't say.
const READY: &str = "ready";

/// First frame of a frontend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientHello {
    /// Version of the protocol.
    pub version: [u64; 2],
    /// Who connects, for logs.
    pub name: String,
    /// Largest frame that the frontend takes.
    pub max_frame_bytes: u64,
}

/// First frame of an engine.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineHello {
    /// Version of the protocol.
    pub version: [u64; 2],
    /// Release of the engine.
    pub rollspan_version: String,
    /// Rank of the engine.
    pub engine_index: u64,
    /// Process id of the engine.
    pub pid: u64,
    /// What the engine takes.
    pub limits: Limits,
    /// What it serves.
    pub model: ModelFacts,
    /// Label in force when the hello was sent.
    pub weight_version: String,
    /// Commit number in force when the hello was sent.
    pub weight_commit: u64,
    /// The scheduler was paused when the hello was sent.
    pub paused: bool,
    /// State of its weights when the hello was sent, as in [`crate::SchedulerStats::weight_state`].
    pub weight_state: String,
}

/// Why an engine ends, in its last frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Dead {
    /// Stable code.
    pub reason: String,
    /// For people.
    pub message: String,
}

/// The first entry of a hello.
struct Magic;

/// The role of a frontend.
struct Role;

scalars! {
    Magic, "a string": Scalar::Text(MAGIC) => Self, Scalar::Text(other) => Err(other_word(MAGIC, other))?;
    Role, "a string": Scalar::Text(ROLE) => Self, Scalar::Text(other) => Err(other_word(ROLE, other))?;
}

fn other_word(expected: &str, found: &str) -> Kind {
    Kind::Incompatible(format!("must be {expected:?}, got {found:?}"))
}

/// A version that this crate speaks: major, minor; what comes behind them is ignored.
impl Wire for [u64; 2] {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(access: A, source: &Source<'_>) -> Result<Self, A::Error> {
        let parts = Vec::array(access, source)?;
        match parts[..] {
            [major, minor, ..] if major == VERSION[0] => Ok([major, minor]),
            [..] => Err(source.refuse(Kind::Incompatible(format!("must be {}.x, got {parts:?}", VERSION[0])))),
        }
    }
}

map_struct! {
    ClientHello:
    check magic: Magic,
    check role: Role,
    required version,
    required name,
    required max_frame_bytes,
}

map_struct! {
    EngineHello:
    check magic: Magic,
    required version,
    required rollspan_version,
    required engine_index,
    required pid,
    required limits,
    required model,
    required weight_version,
    required weight_commit,
    required paused,
    otherwise weight_state: READY,
}

map_struct! {
    Dead:
    required reason,
    required message,
}

impl ClientHello {
    /// The hello of a frontend that speaks this version.
    pub fn new(name: impl Into<String>, max_frame_bytes: u64) -> Self {
        Self { version: VERSION, name: name.into(), max_frame_bytes }
    }

    /// The payload of a `CLIENT_HELLO` frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.map(5);
        writer.entry("magic", MAGIC);
        writer.entry("version", self.version);
        writer.entry("role", ROLE);
        writer.entry("name", &self.name);
        writer.entry("max_frame_bytes", self.max_frame_bytes);
        writer.into_bytes()
    }

    /// Reads the payload of a `CLIENT_HELLO` frame.
    ///
    /// # Errors
    /// The payload is not one well-formed hello of a frontend of this major version.
    pub fn decode(payload: &[u8]) -> DecodeResult<Decoded<Self>> {
        decode("ClientHello", payload, &[])
    }
}

impl EngineHello {
    /// The payload of an `ENGINE_HELLO` frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.map(11);
        writer.entry("magic", MAGIC);
        writer.entry("version", self.version);
        writer.entry("rollspan_version", &self.rollspan_version);
        writer.entry("engine_index", self.engine_index);
        writer.entry("pid", self.pid);
        writer.entry("limits", self.limits);
        writer.entry("model", &self.model);
        writer.entry("weight_version", &self.weight_version);
        writer.entry("weight_commit", self.weight_commit);
        writer.entry("paused", self.paused);
        writer.entry("weight_state", &self.weight_state);
        writer.into_bytes()
    }

    /// Reads the payload of an `ENGINE_HELLO` frame.
    ///
    /// # Errors
    /// The payload is not one well-formed hello of an engine of this major version.
    pub fn decode(payload: &[u8]) -> DecodeResult<Decoded<Self>> {
        decode("EngineHello", payload, &[])
    }
}

impl Dead {
    /// The payload of a DEAD frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new();
        writer.value(self);
        writer.into_bytes()
    }

    /// Reads the payload of a DEAD frame.
    ///
    /// # Errors
    /// The payload is not one well-formed map of these strings.
    pub fn decode(payload: &[u8]) -> DecodeResult<Decoded<Self>> {
        decode("Dead", payload, &[])
    }
}
