//! All uploads of one frontend.
//!
//! The files of an upload are in `SPOOL/UPLOAD`. One is called `FILE.part` until all of it was received: the engine takes
//! only names that end in `.safetensors`.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rollspan_generate::{ApiError, Reason};
use serde_json::{Map, Value, json};

use super::byte_ranges::CONTENT_RANGE;
use super::claim::{Claim, Part};
use super::upload::{Upload, UploadedFile, check_upload_name, incomplete};
use crate::answer::internal;

/// How often expired uploads are looked for at most.
const LEAST_WAIT: Duration = Duration::from_millis(10);

/// All uploads of one frontend.
pub(crate) struct Spool {
    /// Where the engine looks for them; private to this server.
    directory: PathBuf,
    /// Most bytes of all uploads together, those included that are announced and have not come yet.
    limit: u64,
    idle: Duration,
    /// Locked for a few calls of the file system at most, never while bytes are written.
    state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    uploads: BTreeMap<String, Upload>,
    last_id: u64,
}

/// A complete upload that nobody changes until this is dropped.
pub(crate) struct Reading {
    spool: Arc<Spool>,
    upload: String,
}

impl Spool {
    /// Takes at most `limit` bytes; an upload that nobody touches for `idle` is deleted.
    pub fn new(directory: PathBuf, limit: u64, idle: Duration) -> Self {
        Self { directory, limit, idle, state: Mutex::default() }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a file is once all of it was received.
    pub(super) fn path(&self, upload: &str, file: &str) -> PathBuf {
        self.directory.join(upload).join(file)
    }

    /// Where it is until then.
    pub(super) fn part_path(&self, upload: &str, file: &str) -> PathBuf {
        self.path(upload, &format!("{file}.part"))
    }

    /// Claims bytes of a file, and opens the file for them. The first one makes the upload.
    ///
    /// # Errors
    /// A name that is none, an upload that is being read, bytes that another request writes, another size than before, or
    /// no room.
    pub(super) fn claim(self: &Arc<Self>, name: &str, file: &str, part: &Part) -> Result<(Claim, File), ApiError> {
        check_upload_name(&name.into(), "upload")?;
        let mut state = self.state();
        if !state.uploads.contains_key(name) {
            self.make_directory(name).map_err(|error| unusable(name, &error))?;
            state.last_id += 1;
            let made = Upload::new(state.last_id);
            state.uploads.insert(name.to_owned(), made);
        }
        match self.open(&mut state, name, file, part) {
            Ok((upload_id, opened)) => {
                let (spool, upload, file) = (Arc::clone(self), name.to_owned(), file.to_owned());
                Ok((Claim { spool, upload, upload_id, file, range: part.range(), recorded: false }, opened))
            }
            Err(error) => {
                self.forget_if_empty(&mut state, name);
                Err(error)
            }
        }
    }

    fn open(&self, state: &mut State, name: &str, file: &str, part: &Part) -> Result<(u64, File), ApiError> {
        let announced = state.announced();
        let upload = state.uploads.get_mut(name).ok_or_else(|| deleted(name))?;
        upload.check_unread(name)?;
        upload.forget_lost(&self.directory.join(name));
        upload.touched = Instant::now();
        let (range, total) = (part.range(), part.total());
        let known = upload.files.get(file);
        // A whole file replaces the one before, also the bytes behind its own end.
        let collides = |other: &Range<u64>| part.is_whole() || overlap(other, &range);
        if known.is_some_and(|known| known.writing.iter().any(collides)) {
            let message = format!("{file}: another request is writing to the same bytes");
            return Err(incomplete(message, CONTENT_RANGE));
        }
        let before = known.map(|known| known.total);
        if let Some(before) = before.filter(|before| !part.is_whole() && *before != total) {
            let message = format!("{CONTENT_RANGE} must say the same total as before ({before}), got {total}");
            return Err(ApiError::new(Reason::InvalidRequest, message).with_param(CONTENT_RANGE));
        }
        let fresh = part.is_whole() || before.is_none();
        if fresh {
            self.check_room(announced, before.unwrap_or(0), total)?;
        }
        let was_whole = known.is_some_and(|known| known.whole);
        let opened = prepared(&self.path(name, file), &self.part_path(name, file), fresh, was_whole);
        let opened = opened.map_err(|error| unusable(name, &error))?;
        let known = upload.files.entry(file.to_owned()).or_default();
        if fresh {
            *known = UploadedFile { total, ..UploadedFile::default() };
        }
        known.whole = false;
        known.received.remove(&range);
        known.writing.push(range);
        Ok((upload.id, opened))
    }

    /// Refuses `size` bytes in place of others, where that is over the limit.
    ///
    /// # Errors
    /// [`Reason::BodyTooLarge`].
    pub(super) fn check_room(&self, announced: u64, instead_of: u64, size: u64) -> Result<(), ApiError> {
        let limit = self.limit;
        if announced.saturating_sub(instead_of).saturating_add(size) <= limit {
            return Ok(());
        }
        let message = format!("all weight uploads together must be at most {limit} bytes, {announced} are announced");
        Err(ApiError::new(Reason::BodyTooLarge, message))
    }

    /// What an earlier server has left behind under its name is deleted.
    fn make_directory(&self, upload: &str) -> io::Result<()> {
        let directory = self.directory.join(upload);
        match fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        DirBuilder::new().mode(0o700).create(directory)
    }

    /// Removes a file of which nothing was received.
    pub(super) fn forget_file(&self, state: &mut State, upload: &str, file: &str) {
        if let Some(upload) = state.uploads.get_mut(upload) {
            upload.files.remove(file);
        }
        self.forget_if_empty(state, upload);
    }

    fn forget_if_empty(&self, state: &mut State, name: &str) {
        if state.uploads.get(name).is_some_and(|upload| upload.files.is_empty()) {
            state.uploads.remove(name);
            if let Err(error) = fs::remove_dir(self.directory.join(name)) {
                tracing::warn!("upload {name} cannot be deleted: {error}");
            }
        }
    }

    /// Forgets an upload and moves its files out of the way. Gives where they are, to be deleted without the lock.
    fn discard(&self, state: &mut State, name: &str) -> Option<PathBuf> {
        let upload = state.uploads.remove(name)?;
        let discarded = self.directory.join(format!(".deleted-{}", upload.id));
        match fs::rename(self.directory.join(name), &discarded) {
            Ok(()) => Some(discarded),
            Err(error) => {
                tracing::warn!("upload {name} cannot be deleted: {error}");
                None
            }
        }
    }

    /// What of an upload's files is there.
    ///
    /// # Errors
    /// There is no such upload.
    pub fn describe(&self, name: &str) -> Result<Value, ApiError> {
        check_upload_name(&name.into(), "upload")?;
        let mut state = self.state();
        let absent = || ApiError::new(Reason::NotFound, format!("upload {name} does not exist")).with_param("upload");
        let upload = state.uploads.get_mut(name).ok_or_else(absent)?;
        if upload.readers == 0 {
            upload.forget_lost(&self.directory.join(name));
        }
        let files: Map<_, _> = upload.files.iter().map(|(name, file)| (name.clone(), file.to_json())).collect();
        Ok(json!({"upload": name, "files": files}))
    }

    /// Keeps a complete upload as it is while the engine reads it; `path` is the field that named it.
    ///
    /// # Errors
    /// [`Reason::UploadIncomplete`] with the first thing that is missing.
    pub fn reading(self: &Arc<Self>, name: &Value, path: &str) -> Result<Reading, ApiError> {
        let name = check_upload_name(name, path)?;
        let mut state = self.state();
        let absent = || incomplete(format!("upload {name} does not exist"), path);
        let upload = state.uploads.get_mut(name).ok_or_else(absent)?;
        if upload.readers == 0 {
            upload.forget_lost(&self.directory.join(name));
        }
        upload.check_complete(name, path)?;
        upload.readers += 1;
        Ok(Reading { spool: Arc::clone(self), upload: name.to_owned() })
    }

    /// Deletes an upload with all its files; one that does not exist is deleted already.
    ///
    /// # Errors
    /// [`Reason::UpdateActive`]: the engine reads it at the moment.
    pub fn delete(&self, name: &str) -> Result<(), ApiError> {
        check_upload_name(&name.into(), "upload")?;
        let mut state = self.state();
        let Some(upload) = state.uploads.get(name) else { return Ok(()) };
        upload.check_unread(name)?;
        let discarded = self.discard(&mut state, name);
        drop(state);
        delete_files(discarded);
        Ok(())
    }

    /// Deletes uploads that are idle for too long. Gives how long none can be.
    pub fn expire(&self) -> Duration {
        let mut state = self.state();
        let is_idle = |upload: &Upload| upload.readers == 0 && upload.touched.elapsed() >= self.idle;
        let idle = state.uploads.iter().filter(|(_, upload)| is_idle(upload)).map(|(name, _)| name.clone());
        let idle: Vec<String> = idle.collect();
        for name in &idle {
            tracing::warn!("upload {name} was idle for {} s: deleted", self.idle.as_secs_f64());
        }
        let discarded: Vec<_> = idle.iter().filter_map(|name| self.discard(&mut state, name)).collect();
        let oldest = state.uploads.values().map(|upload| upload.touched.elapsed()).max().unwrap_or_default();
        drop(state);
        delete_files(discarded);
        self.idle.saturating_sub(oldest).max(self.idle / 10).max(LEAST_WAIT)
    }

    /// Deletes everything.
    pub fn close(&self) {
        let mut state = self.state();
        let names: Vec<String> = state.uploads.keys().cloned().collect();
        let discarded: Vec<_> = names.iter().filter_map(|name| self.discard(&mut state, name)).collect();
        drop(state);
        delete_files(discarded);
    }
}

impl State {
    /// Bytes of all files, as far as their clients announced them.
    pub(super) fn announced(&self) -> u64 {
        self.uploads.values().flat_map(|upload| upload.files.values()).map(|file| file.total).sum()
    }

    /// The file of a claim, touched.
    ///
    /// # Errors
    /// The upload was deleted meanwhile.
    pub(super) fn claimed(&mut self, claim: &Claim) -> Result<&mut UploadedFile, ApiError> {
        let upload = self.uploads.get_mut(&claim.upload).filter(|upload| upload.id == claim.upload_id);
        let upload = upload.ok_or_else(|| deleted(&claim.upload))?;
        upload.touched = Instant::now();
        upload.files.get_mut(&claim.file).ok_or_else(|| deleted(&claim.upload))
    }
}

impl Reading {
    /// Ends the reading and deletes the upload, unless somebody else still reads it.
    pub fn delete(self) {
        let (spool, upload) = (Arc::clone(&self.spool), self.upload.clone());
        drop(self);
        if let Err(error) = spool.delete(&upload) {
            tracing::debug!("{error}");
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Some(upload) = self.spool.state().uploads.get_mut(&self.upload) {
            upload.readers -= 1;
            upload.touched = Instant::now();
        }
    }
}

/// Opens a file for a part of it, whatever its name is by now.
fn prepared(whole: &Path, partial: &Path, fresh: bool, was_whole: bool) -> io::Result<File> {
    if was_whole {
        fs::rename(whole, partial)?;
    }
    OpenOptions::new().write(true).create(true).truncate(fresh).mode(0o600).open(partial)
}

fn delete_files(discarded: impl IntoIterator<Item = PathBuf>) {
    for directory in discarded {
        if let Err(error) = fs::remove_dir_all(&directory) {
            tracing::warn!("{} cannot be deleted: {error}", directory.display());
        }
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

fn deleted(upload: &str) -> ApiError {
    ApiError::new(Reason::NotFound, format!("upload {upload} was deleted meanwhile")).with_param("upload")
}

/// The file system refuses something.
pub(super) fn unusable(upload: &str, error: &io::Error) -> ApiError {
    internal(format!("upload {upload}: {error}"))
}
