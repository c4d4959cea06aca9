//! Maps of counters that travel with outputs.

use crate::reader::{Reader, Result};
use crate::writer::Writer;

/// State of the scheduler after a step. Keys that are absent are 0; unknown ones are ignored.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SchedulerStats {
    /// Requests in the running batch.
    pub num_running_reqs: u64,
    /// Requests that wait for a place in it.
    pub num_waiting_reqs: u64,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_cache_usage: f64,
    /// Steps launched so far.
    pub step_counter: u64,
    /// Whether the scheduler is paused (ours); `None` from engines that don't say.
    pub paused: Option<bool>,
}

impl SchedulerStats {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut stats = Self::default();
        reader.entries(|reader, key| {
            match key {
                "num_running_reqs" => stats.num_running_reqs = reader.u64()?,
                "num_waiting_reqs" => stats.num_waiting_reqs = reader.u64()?,
                "kv_cache_usage" => stats.kv_cache_usage = reader.f64()?,
                "step_counter" => stats.step_counter = reader.u64()?,
                "paused" => stats.paused = if reader.nil()? { None } else { Some(reader.boolean()?) },
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(stats)
    }

    pub(crate) fn write(&self, writer: &mut Writer) {
        writer.map(4 + usize::from(self.paused.is_some()));
        writer.text("num_running_reqs");
        writer.u64(self.num_running_reqs);
        writer.text("num_waiting_reqs");
        writer.u64(self.num_waiting_reqs);
        writer.text("kv_cache_usage");
        writer.f64(self.kv_cache_usage);
        writer.text("step_counter");
        writer.u64(self.step_counter);
        if let Some(paused) = self.paused {
            writer.text("paused");
            writer.boolean(paused);
        }
    }
}

/// How the prompt of a request was computed. Keys that are absent are 0; unknown ones are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefillStats {
    /// Tokens of the prompt.
    pub num_prompt_tokens: u64,
    /// Of these, computed by this engine.
    pub num_computed_tokens: u64,
    /// Of these, taken from a cache.
    pub num_cached_tokens: u64,
}

impl PrefillStats {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self> {
        let mut stats = Self::default();
        reader.entries(|reader, key| {
            match key {
                "num_prompt_tokens" => stats.num_prompt_tokens = reader.u64()?,
                "num_computed_tokens" => stats.num_computed_tokens = reader.u64()?,
                "num_cached_tokens" => stats.num_cached_tokens = reader.u64()?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        Ok(stats)
    }

    pub(crate) fn write(self, writer: &mut Writer) {
        writer.map(3);
        writer.text("num_prompt_tokens");
        writer.u64(self.num_prompt_tokens);
        writer.text("num_computed_tokens");
        writer.u64(self.num_computed_tokens);
        writer.text("num_cached_tokens");
        writer.u64(self.num_cached_tokens);
    }
}
