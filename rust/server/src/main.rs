//! `rollspan-http`: the HTTP frontend as a process.
//!
//! Stdout carries JSON lines for whoever started it (`listening`, `ready`), stderr the log. Exit codes: 0 after SIGINT or
//! SIGTERM, 1 for a failure, 2 for wrong usage.

use std::io::{self, Read, Write};
use std::process::ExitCode;
use std::thread;

use clap::Parser;
use rollspan_server::{Event, Flags, serve};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

fn main() -> ExitCode {
    let flags = Flags::parse();
    if let Err(error) = flags.check() {
        error.exit();
    }
    tracing_subscriber::fmt().with_max_level(flags.log_level).with_writer(io::stderr).with_ansi(false).init();
    match run(&flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start threads: {error}"))?;
    let orphaned = flags.watch_stdin.then(watch_stdin);
    let outcome = runtime.block_on(async {
        tokio::select! {
            outcome = serve_until_signal(flags) => outcome,
            () = parent_gone(orphaned) => Ok(()),
        }
    });
    // Nothing that still runs is waited for: who is left has been told, or is gone.
    runtime.shutdown_background();
    outcome
}

async fn serve_until_signal(flags: &Flags) -> Result<(), String> {
    let (host, port) = (flags.host.as_str(), flags.port);
    let listener = TcpListener::bind((host, port)).await;
    let listener = listener.map_err(|error| format!("cannot listen on {host}:{port}: {error}"))?;
    let signals = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
    let [mut interrupt, mut terminate] = match signals {
        [Ok(interrupt), Ok(terminate)] => [interrupt, terminate],
        [Err(error), _] | [_, Err(error)] => return Err(format!("cannot handle signals: {error}")),
    };
    let stop = async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    serve(listener, flags.options(), announce, stop).await.map_err(|error| error.to_string())
}

/// One JSON line for whoever started this process; that it does not listen is no failure.
fn announce(event: &Event) {
    let line = match event {
        Event::Listening(address) => json!({"event": "listening", "address": address.to_string()}),
        Event::Ready => json!({"event": "ready"}),
    };
    let mut stdout = io::stdout().lock();
    if let Err(error) = writeln!(stdout, "{line}").and_then(|()| stdout.flush()) {
        tracing::warn!("nobody reads stdout: {error}");
    }
}

/// Tells when stdin comes to its end. A thread of its own: a read of stdin cannot be cancelled.
fn watch_stdin() -> oneshot::Receiver<()> {
    let (gone, parent_gone) = oneshot::channel();
    thread::spawn(move || {
        let mut ignored = [0; 256];
        while matches!(io::stdin().read(&mut ignored), Ok(count) if count > 0) {}
        drop(gone);
    });
    parent_gone
}

async fn parent_gone(watched: Option<oneshot::Receiver<()>>) {
    match watched {
        // The sender never sends: its end is the event.
        Some(watched) => drop(watched.await),
        None => std::future::pending().await,
    }
}
