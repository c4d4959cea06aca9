//! Uploads of weights: pieces in any order, over broken connections, within bounds, until the engine has read them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod server_support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use rollspan_engine_client::mock::{MockEngine, MockLink, hello};
use rollspan_protocol::UtilityFailure;
use rollspan_server::Options;
use serde_json::{Value, json};
use server_support::{Answer, Server, in_time};
use tempfile::TempDir;

const FILE: &str = "/weight_uploads/u1/model.safetensors";

struct Spooled {
    server: Server,
    link: MockLink,
    spool: TempDir,
    _engine: MockEngine,
}

impl Spooled {
    async fn with(adjust: impl FnOnce(&mut Options)) -> Self {
        let spool = tempfile::tempdir().unwrap();
        let adjusted = |options: &mut Options| {
            options.weights_spool = Some(spool.path().to_owned());
            adjust(options);
        };
        let (server, link, engine) = Server::with_engine(adjusted, &hello()).await;
        Self { server, link, spool, _engine: engine }
    }

    async fn put(&self, path: &str, body: &[u8], headers: &[&str]) -> Answer {
        let length = format!("Content-Length: {}", body.len());
        let mut connection = self.server.begin("PUT", path, &[&[length.as_str()], headers].concat()).await;
        connection.write(body).await;
        in_time(connection.answer()).await
    }

    async fn put_range(&self, body: &[u8], start: usize, total: usize) -> Answer {
        let range = format!("Content-Range: bytes {start}-{}/{total}", start + body.len() - 1);
        self.put(FILE, body, &[&range]).await
    }

    async fn get(&self) -> Answer {
        in_time(self.server.ask("GET", "/weight_uploads/u1", &Value::Null)).await
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.spool.path().join("u1"))
            .map(|entries| entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect())
            .unwrap_or_default();
        names.sort();
        names
    }

    fn content(&self) -> Vec<u8> {
        fs::read(self.spool.path().join("u1/model.safetensors")).unwrap()
    }
}

fn checksum(body: &[u8]) -> String {
    format!("X-Checksum: blake3:{}", blake3::hash(body))
}

#[tokio::test]
async fn pieces_come_in_any_order_and_the_last_one_makes_the_file() {
    let spooled = Spooled::with(|_| {}).await;
    let answer = spooled.put_range(b"world", 6, 11).await;
    let expected = json!({"upload": "u1", "file": "model.safetensors", "received": [[6, 11]], "total": 11});
    assert_eq!((answer.status, answer.json()), (200, expected));
    let answer = spooled.put_range(b"hello", 0, 11).await.json();
    assert_eq!(answer["received"], json!([[0, 5], [6, 11]]));
    assert_eq!(spooled.names(), ["model.safetensors.part"]);
    let answer = spooled.put_range(b" ", 5, 11).await.json();
    assert_eq!(answer["received"], json!([[0, 11]]));
    assert_eq!((spooled.names(), spooled.content()), (vec!["model.safetensors".to_owned()], b"hello world".to_vec()));
    let files = json!({"model.safetensors": {"received": [[0, 11]], "total": 11}});
    assert_eq!(spooled.get().await.json(), json!({"upload": "u1", "files": files}));
    let mode = |path: &str| fs::metadata(spooled.spool.path().join(path)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("u1"), mode("u1/model.safetensors")), (0o700, 0o600));
}

#[tokio::test]
async fn a_piece_that_comes_again_is_written_over() {
    let spooled = Spooled::with(|_| {}).await;
    spooled.put(FILE, b"hello world", &[]).await;
    let answer = spooled.put_range(b"W", 6, 11).await.json();
    assert_eq!(answer["received"], json!([[0, 11]]));
    assert_eq!(spooled.content(), b"hello World");
    let answer = spooled.put(FILE, b"other", &[]).await.json();
    assert_eq!((&answer["received"], &answer["total"]), (&json!([[0, 5]]), &json!(5)));
    assert_eq!(spooled.content(), b"other");
}

#[tokio::test]
async fn a_wrong_checksum_records_nothing() {
    let spooled = Spooled::with(|_| {}).await;
    let wrong = checksum(b"hellO");
    let refused = spooled.put(FILE, b"hello", &[&wrong, "Content-Range: bytes 0-4/11"]).await;
    assert_eq!(refused.failure(), (400, "checksum_mismatch".to_owned()));
    assert_eq!(spooled.get().await.failure(), (404, "not_found".to_owned()));
    assert_eq!(fs::read_dir(spooled.spool.path()).unwrap().count(), 0);
    assert_eq!(spooled.put_range(b" world", 5, 11).await.status, 200);
    let refused = spooled.put(FILE, b"hello", &[&wrong, "Content-Range: bytes 0-4/11"]).await;
    assert_eq!(refused.status, 400);
    assert_eq!(spooled.get().await.json()["files"]["model.safetensors"]["received"], json!([[5, 11]]));
    let answer = spooled.put(FILE, b"hello", &[&checksum(b"hello"), "Content-Range: bytes 0-4/11"]).await;
    assert_eq!(answer.json()["received"], json!([[0, 11]]));
}

#[tokio::test]
async fn a_connection_that_breaks_leaves_its_bytes_missing() {
    let spooled = Spooled::with(|_| {}).await;
    spooled.put_range(b"hello", 0, 11).await;
    let headers = ["Content-Length: 6", "Content-Range: bytes 5-10/11"];
    let mut cut = spooled.server.begin("PUT", FILE, &headers).await;
    cut.write(b" wo").await;
    // Until the bytes of the broken one are free again, others are refused.
    let refused = async || spooled.put_range(b" world", 5, 11).await;
    while refused().await.status == 200 {}
    assert_eq!(refused().await.failure(), (409, "upload_incomplete".to_owned()));
    assert_eq!(spooled.get().await.json()["files"]["model.safetensors"]["received"], json!([[0, 5]]));
    drop(cut);
    in_time(async { while refused().await.status != 200 {} }).await;
    assert_eq!(spooled.content(), b"hello world");
}

#[tokio::test]
async fn a_file_of_unknown_size_may_come_in_chunks() {
    let spooled = Spooled::with(|options| options.max_weight_upload_bytes = Some(4_000_000)).await;
    let piece = vec![7; 1_500_000];
    let check = checksum(&piece.repeat(2));
    let headers = ["Transfer-Encoding: chunked", &check];
    let mut connection = spooled.server.begin("PUT", FILE, &headers).await;
    for _ in 0..2 {
        connection.write(format!("{:x}\r\n", piece.len()).as_bytes()).await;
        connection.write(&piece).await;
        connection.write(b"\r\n").await;
    }
    connection.write(b"0\r\n\r\n").await;
    let answer = in_time(connection.answer()).await.json();
    assert_eq!((&answer["received"], &answer["total"]), (&json!([[0, 3_000_000]]), &json!(3_000_000)));
    assert_eq!(spooled.content(), piece.repeat(2));
}

#[tokio::test]
async fn all_uploads_together_have_a_bound() {
    let spooled = Spooled::with(|options| options.max_weight_upload_bytes = Some(12)).await;
    assert_eq!(spooled.put_range(b"hello", 0, 10).await.status, 200);
    let refused = spooled.put("/weight_uploads/u2/a.safetensors", b"abc", &[]).await;
    assert_eq!(refused.failure(), (413, "body_too_large".to_owned()));
    assert_eq!(spooled.put("/weight_uploads/u2/a.safetensors", b"ab", &[]).await.status, 200);
    // What is replaced makes room.
    assert_eq!(spooled.put(FILE, b"0123456789", &[]).await.status, 200);
    assert_eq!(in_time(spooled.server.ask("DELETE", "/weight_uploads/u2", &Value::Null)).await.status, 200);
    assert_eq!(spooled.put("/weight_uploads/u3/a.safetensors", b"ab", &[]).await.status, 200);
}

#[tokio::test]
async fn names_ranges_and_checksums_out_of_bounds_are_refused() {
    let spooled = Spooled::with(|_| {}).await;
    let long = format!("/weight_uploads/{}/a.safetensors", "u".repeat(129));
    for (path, headers, param) in [
        ("/weight_uploads/.u/a.safetensors", &[][..], "upload"),
        ("/weight_uploads/%2e%2e/a.safetensors", &[], "upload"),
        ("/weight_uploads/u%2fv/a.safetensors", &[], "upload"),
        (long.as_str(), &[], "upload"),
        ("/weight_uploads/u/model.bin", &[], "file"),
        ("/weight_uploads/u/.safetensors", &[], "file"),
        (FILE, &["Content-Range: bytes 0-4/4"], "Content-Range"),
        (FILE, &["Content-Range: bytes 0-3/4"], "Content-Range"),
        (FILE, &["Content-Range: items 0-4/9"], "Content-Range"),
        (FILE, &["X-Checksum: sha256:00"], "X-Checksum"),
        (FILE, &["X-Checksum: blake3:00"], "X-Checksum"),
    ] {
        let refused = spooled.put(path, b"hello", headers).await;
        let error = &refused.json()["error"];
        assert_eq!((refused.status, error["param"].as_str()), (400, Some(param)), "{path} {headers:?}");
    }
    spooled.put_range(b"hello", 0, 11).await;
    let refused = spooled.put_range(b"world", 5, 10).await;
    assert_eq!(refused.failure(), (400, "invalid_request".to_owned()));
    assert_eq!(fs::read_dir(spooled.spool.path()).unwrap().count(), 1);
}

#[tokio::test]
async fn the_engine_reads_an_upload_once_it_is_complete_and_then_it_is_gone() {
    let mut spooled = Spooled::with(|_| {}).await;
    let body = json!({"update_info": {"backend": "http", "upload": "u1"}});
    let refused = in_time(spooled.server.ask("POST", "/update_weights", &body)).await;
    assert_eq!(refused.failure(), (409, "upload_incomplete".to_owned()));
    spooled.put_range(b"hello", 0, 11).await;
    let refused = in_time(spooled.server.ask("POST", "/update_weights", &body)).await;
    let message = "upload u1 is incomplete: model.safetensors lacks bytes 5 to 10 of 11";
    assert_eq!(refused.json()["error"]["message"], message);
    spooled.put_range(b" world", 5, 11).await;
    let asked = spooled.server.send("POST", "/update_weights", body.to_string().as_bytes()).await;
    let call = in_time(spooled.link.call()).await;
    assert_eq!((call.method.as_str(), &call.args), ("update_weights", &vec![body["update_info"].clone()]));
    assert_eq!(spooled.put_range(b"W", 6, 11).await.failure(), (409, "update_active".to_owned()));
    assert_eq!(
        in_time(spooled.server.ask("DELETE", "/weight_uploads/u1", &Value::Null)).await.failure(),
        (409, "update_active".to_owned())
    );
    assert_eq!(spooled.content(), b"hello world");
    spooled.link.answer(call.call_id, Ok(Value::Null)).await;
    assert_eq!(in_time(asked.answer()).await.json(), json!({"message": "Weights updated"}));
    assert_eq!(spooled.get().await.status, 404);
    assert_eq!(fs::read_dir(spooled.spool.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn files_that_an_engine_has_used_up_in_vain_are_missing() {
    let mut spooled = Spooled::with(|_| {}).await;
    spooled.put(FILE, b"hello world", &[]).await;
    let body = json!({"update_info": {"upload": "u1"}});
    let asked = spooled.server.send("POST", "/update_weights", body.to_string().as_bytes()).await;
    let call = in_time(spooled.link.call()).await;
    fs::remove_file(spooled.spool.path().join("u1/model.safetensors")).unwrap();
    let failure = UtilityFailure { message: "no".to_owned(), reason: Some("weights_invalid".to_owned()) };
    spooled.link.answer(call.call_id, Err(failure)).await;
    assert_eq!(in_time(asked.answer()).await.failure(), (400, "weights_invalid".to_owned()));
    let refused = in_time(spooled.server.ask("POST", "/update_weights", &body)).await;
    assert_eq!(refused.failure(), (409, "upload_incomplete".to_owned()));
    assert_eq!(spooled.get().await.json()["files"]["model.safetensors"]["received"], json!([]));
    assert_eq!(spooled.put_range(b"hello", 0, 11).await.json()["received"], json!([[0, 5]]));
}

#[tokio::test]
async fn an_upload_that_is_deleted_under_a_request_ends_it() {
    let spooled = Spooled::with(|_| {}).await;
    let headers = ["Content-Length: 5", "Content-Range: bytes 0-4/11"];
    let mut open = spooled.server.begin("PUT", FILE, &headers).await;
    open.write(b"he").await;
    in_time(async { while spooled.get().await.status != 200 {} }).await;
    let deleted = in_time(spooled.server.ask("DELETE", "/weight_uploads/u1", &Value::Null)).await;
    assert_eq!(deleted.json(), json!({"status": "deleted"}));
    open.write(b"llo").await;
    assert_eq!(in_time(open.answer()).await.failure(), (404, "not_found".to_owned()));
    assert_eq!(fs::read_dir(spooled.spool.path()).unwrap().count(), 0);
    let again = in_time(spooled.server.ask("DELETE", "/weight_uploads/u1", &Value::Null)).await;
    assert_eq!(again.json(), json!({"status": "deleted"}));
}

#[tokio::test]
async fn an_upload_that_nobody_touches_expires() {
    let spooled = Spooled::with(|options| options.weight_update_timeout = Duration::from_millis(30)).await;
    assert_eq!(spooled.put_range(b"hello", 0, 11).await.status, 200);
    in_time(async { while spooled.get().await.status == 200 {} }).await;
    in_time(async { while fs::read_dir(spooled.spool.path()).unwrap().count() > 0 {} }).await;
}

#[tokio::test]
async fn a_server_that_stops_leaves_no_uploads_behind() {
    let spooled = Spooled::with(|_| {}).await;
    spooled.put_range(b"hello", 0, 11).await;
    let Spooled { server, spool, .. } = spooled;
    server.stop.send(()).unwrap();
    in_time(server.serving).await.unwrap().unwrap();
    assert_eq!(fs::read_dir(spool.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn uploads_need_a_directory() {
    let (server, _link, _engine) = Server::ready().await;
    for method in ["GET", "DELETE"] {
        let answer = in_time(server.ask(method, "/weight_uploads/u1", &Value::Null)).await;
        assert_eq!(answer.failure(), (404, "not_found".to_owned()));
    }
    let answer = in_time(server.ask("POST", "/weight_uploads/u1", &Value::Null)).await;
    assert_eq!((answer.status, answer.header("allow")), (405, Some("DELETE, GET, HEAD")));
}
