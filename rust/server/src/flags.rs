//! The command line of `rollspan-http`; `python -m rollspan.frontend` has the same.

use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Parser;
use clap::error::ErrorKind;
use tracing::level_filters::LevelFilter;

use crate::options::Options;

/// The HTTP frontend of rollspan, in front of one engine or several.
#[derive(Debug, Clone, PartialEq, Parser)]
#[command(name = "rollspan-http", version, disable_help_subcommand = true)]
pub struct Flags {
    /// The engine's Unix socket; once for each engine of a set, by index
    #[arg(long, value_name = "PATH", required = true)]
    pub engine: Vec<PathBuf>,
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on, 0 for any free one
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Name of the model in the API [default: the engine's]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Largest request body
    #[arg(long, value_name = "BYTES", default_value_t = 64 * 1024 * 1024, value_parser = at_least_one::<usize>)]
    pub max_body_bytes: usize,
    /// Most open requests; more get 429
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_one::<usize>)]
    pub max_queued_requests: usize,
    /// Refuse unknown request fields
    #[arg(long)]
    pub strict_requests: bool,
    /// How long the engine may take to start
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub engine_ready_timeout: Duration,
    /// How long open requests may go on after a signal
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = seconds)]
    pub shutdown_timeout: Duration,
    /// Private directory for uploads of weights [default: they are refused]
    #[arg(long, value_name = "DIR")]
    pub weights_spool: Option<PathBuf>,
    /// Most bytes of all uploads of weights together [default: two models in float32, and 64 MiB]
    #[arg(long, value_name = "BYTES", value_parser = at_least_one::<u64>)]
    pub max_weight_upload_bytes: Option<u64>,
    /// How long an upload of weights may be idle before it is deleted
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = some_seconds)]
    pub weight_update_timeout: Duration,
    /// Allow an address that other machines can reach
    #[arg(long)]
    pub insecure: bool,
    /// Exit as soon as stdin is closed
    #[arg(long)]
    pub watch_stdin: bool,
    /// Least severe level logged: critical, error, warning, info or debug
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = level)]
    pub log_level: LevelFilter,
}

impl Flags {
    /// What no single flag shows to be wrong.
    ///
    /// # Errors
    /// The host can be reached from other machines and `--insecure` is not there.
    pub fn check(&self) -> Result<(), clap::Error> {
        if self.insecure || is_loopback(&self.host) {
            return Ok(());
        }
        let message =
            format!("--host {} can be reached from other machines: add --insecure to allow that\n", self.host);
        Err(clap::Error::raw(ErrorKind::ArgumentConflict, message))
    }

    /// What the server needs of them.
    pub fn options(&self) -> Options {
        Options {
            engines: self.engine.clone(),
            served_model_name: self.served_model_name.clone(),
            max_body_bytes: self.max_body_bytes,
            max_queued_requests: self.max_queued_requests,
            strict_requests: self.strict_requests,
            engine_ready_timeout: self.engine_ready_timeout,
            shutdown_timeout: self.shutdown_timeout,
            weights_spool: self.weights_spool.clone(),
            max_weight_upload_bytes: self.max_weight_upload_bytes,
            weight_update_timeout: self.weight_update_timeout,
        }
    }
}

fn is_loopback(host: &str) -> bool {
    host.parse::<IpAddr>().map_or(host == "localhost", |address| address.is_loopback())
}

fn at_least_one<T: FromStr + From<u8> + PartialOrd>(text: &str) -> Result<T, String> {
    let value = text.parse().ok().filter(|value| *value >= T::from(1));
    value.ok_or_else(|| "must be an integer of at least 1".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let value = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    value.ok_or_else(|| "must be a number of seconds of at least 0".to_owned())
}

fn some_seconds(text: &str) -> Result<Duration, String> {
    let value = seconds(text).ok().filter(|seconds| !seconds.is_zero());
    value.ok_or_else(|| "must be a number of seconds above 0".to_owned())
}

fn level(text: &str) -> Result<LevelFilter, String> {
    Ok(match text {
        "critical" | "error" => LevelFilter::ERROR,
        "warning" | "warn" => LevelFilter::WARN,
        "info" => LevelFilter::INFO,
        "debug" => LevelFilter::DEBUG,
        _ => return Err("must be critical, error, warning, info or debug".to_owned()),
    })
}
