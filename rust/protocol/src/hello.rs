//! The first frame of each side, and the last one of a failing engine.

use crate::decoded::{Decoded, decode};
use crate::error::DecodeErrorKind as Kind;
use crate::facts::{Limits, ModelFacts, required};
use crate::reader::{Reader, Result};
use crate::writer::Writer;

/// First entry of both hellos.
pub const MAGIC: &str = "rollspan";

/// Version of the protocol that this crate speaks: major, minor.
pub const VERSION: [u64; 2] = [1, 0];

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
}

/// Why an engine ends, in its last frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dead {
    /// Stable code.
    pub reason: String,
    /// For people.
    pub message: String,
}

fn check_magic(magic: Option<&str>) -> Result<()> {
    match required(magic, "magic")? {
        MAGIC => Ok(()),
        other => Err(Kind::Incompatible(format!("magic must be {MAGIC:?}, got {other:?}")).into()),
    }
}

fn read_version(reader: &mut Reader<'_>) -> Result<[u64; 2]> {
    let parts = reader.list(Reader::u64)?;
    match parts[..] {
        [major, minor, ..] if major == VERSION[0] => Ok([major, minor]),
        [..] => Err(Kind::Incompatible(format!("version must be {}.x, got {parts:?}", VERSION[0])).into()),
    }
}

fn write_preamble(writer: &mut Writer, version: [u64; 2]) {
    writer.text("magic");
    writer.text(MAGIC);
    writer.text("version");
    writer.array(version.len());
    for part in version {
        writer.u64(part);
    }
}

impl ClientHello {
    /// The hello of a frontend that speaks this version.
    pub fn new(name: impl Into<String>, max_frame_bytes: u64) -> Self {
        Self { version: VERSION, name: name.into(), max_frame_bytes }
    }

    /// The payload of a `CLIENT_HELLO` frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.map(5);
        write_preamble(&mut writer, self.version);
        writer.text("role");
        writer.text("frontend");
        writer.text("name");
        writer.text(&self.name);
        writer.text("max_frame_bytes");
        writer.u64(self.max_frame_bytes);
        writer.into_bytes()
    }

    /// Reads the payload of a `CLIENT_HELLO` frame.
    ///
    /// # Errors
    /// The payload is not one well-formed hello of a frontend of this major version.
    pub fn decode(payload: &[u8]) -> Result<Decoded<Self>> {
        decode("ClientHello", payload, &[], |reader| {
            let (mut magic, mut version, mut role, mut name, mut max_frame_bytes) = (None, None, None, None, None);
            reader.entries(|reader, key| {
                match key {
                    "magic" => magic = Some(reader.text()?),
                    "version" => version = Some(read_version(reader)?),
                    "role" => role = Some(reader.text()?),
                    "name" => name = Some(reader.string()?),
                    "max_frame_bytes" => max_frame_bytes = Some(reader.u64()?),
                    _ => reader.skip()?,
                }
                Ok(())
            })?;
            check_magic(magic)?;
            match required(role, "role")? {
                "frontend" => {}
                other => return Err(Kind::Incompatible(format!("role must be \"frontend\", got {other:?}")).into()),
            }
            Ok(Self {
                version: required(version, "version")?,
                name: required(name, "name")?,
                max_frame_bytes: required(max_frame_bytes, "max_frame_bytes")?,
            })
        })
    }
}

impl EngineHello {
    /// The payload of an `ENGINE_HELLO` frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.map(10);
        write_preamble(&mut writer, self.version);
        writer.text("rollspan_version");
        writer.text(&self.rollspan_version);
        writer.text("engine_index");
        writer.u64(self.engine_index);
        writer.text("pid");
        writer.u64(self.pid);
        writer.text("limits");
        self.limits.write(&mut writer);
        writer.text("model");
        self.model.write(&mut writer);
        writer.text("weight_version");
        writer.text(&self.weight_version);
        writer.text("weight_commit");
        writer.u64(self.weight_commit);
        writer.text("paused");
        writer.boolean(self.paused);
        writer.into_bytes()
    }

    /// Reads the payload of an `ENGINE_HELLO` frame.
    ///
    /// # Errors
    /// The payload is not one well-formed hello of an engine of this major version.
    pub fn decode(payload: &[u8]) -> Result<Decoded<Self>> {
        decode("EngineHello", payload, &[], |reader| {
            let (mut magic, mut version, mut release, mut index, mut pid) = (None, None, None, None, None);
            let (mut limits, mut model, mut label, mut commit, mut paused) = (None, None, None, None, None);
            reader.entries(|reader, key| {
                match key {
                    "magic" => magic = Some(reader.text()?),
                    "version" => version = Some(read_version(reader)?),
                    "rollspan_version" => release = Some(reader.string()?),
                    "engine_index" => index = Some(reader.u64()?),
                    "pid" => pid = Some(reader.u64()?),
                    "limits" => limits = Some(Limits::read(reader)?),
                    "model" => model = Some(ModelFacts::read(reader)?),
                    "weight_version" => label = Some(reader.string()?),
                    "weight_commit" => commit = Some(reader.u64()?),
                    "paused" => paused = Some(reader.boolean()?),
                    _ => reader.skip()?,
                }
                Ok(())
            })?;
            check_magic(magic)?;
            Ok(Self {
                version: required(version, "version")?,
                rollspan_version: required(release, "rollspan_version")?,
                engine_index: required(index, "engine_index")?,
                pid: required(pid, "pid")?,
                limits: required(limits, "limits")?,
                model: required(model, "model")?,
                weight_version: required(label, "weight_version")?,
                weight_commit: required(commit, "weight_commit")?,
                paused: required(paused, "paused")?,
            })
        })
    }
}

impl Dead {
    /// The payload of a DEAD frame.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        writer.map(2);
        writer.text("reason");
        writer.text(&self.reason);
        writer.text("message");
        writer.text(&self.message);
        writer.into_bytes()
    }

    /// Reads the payload of a DEAD frame.
    ///
    /// # Errors
    /// The payload is not one well-formed map of these strings.
    pub fn decode(payload: &[u8]) -> Result<Decoded<Self>> {
        decode("Dead", payload, &[], |reader| {
            let (mut reason, mut message) = (None, None);
            reader.entries(|reader, key| {
                match key {
                    "reason" => reason = Some(reader.string()?),
                    "message" => message = Some(reader.string()?),
                    _ => reader.skip()?,
                }
                Ok(())
            })?;
            Ok(Self { reason: required(reason, "reason")?, message: required(message, "message")? })
        })
    }
}
