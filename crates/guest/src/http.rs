//! As much of HTTP/1.1 as one request per connection needs, from both ends.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream},
    time::Duration,
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest body accepted.
const BODY_BYTES_MAX: u64 = 64 << 20;
const LINE_BYTES_MAX: u64 = 64 << 10;
const HEADERS_MAX: usize = 100;

/// Why there is no response; always worth another try.
#[derive(Debug)]
pub(crate) struct HttpError(pub(crate) String);

impl<E: std::error::Error> From<E> for HttpError {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

/// Where to post.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    address: SocketAddr,
    host: String,
    path: String,
}

/// Names in lower case, and values.
pub(crate) type Headers = Vec<(String, String)>;

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Headers,
    pub(crate) body: Vec<u8>,
}

/// What a client of ours asks.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: Headers,
    pub(crate) body: Vec<u8>,
}

/// The value of a header; the name in lower case.
pub(crate) fn header<'a>(headers: &'a Headers, name: &str) -> Option<&'a str> {
    let found = headers.iter().find(|(known, _)| known == name);
    found.map(|(_, value)| value.as_str())
}

impl Endpoint {
    pub(crate) fn parse(base_url: &str, suffix: &str) -> Result<Self, String> {
        let bad = |what: &str| format!("{base_url}: {what}");
        let rest = base_url
            .strip_prefix("http://")
            .ok_or_else(|| bad("http:// is expected"))?;
        let (host, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        let (name, port) = match host.rsplit_once(':') {
            Some((name, port)) => (name, port.parse().map_err(|_| bad("bad port"))?),
            None => (host, 80),
        };
        let ip = match name {
            "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            _ => name
                .trim_matches(['[', ']'])
                .parse()
                .map_err(|_| bad("an IP address or localhost is expected"))?,
        };
        let path = match format!("{}{suffix}", path.trim_end_matches('/')) {
            empty if empty.is_empty() => "/".to_owned(),
            path => path,
        };
        Ok(Self {
            address: SocketAddr::new(ip, port),
            host: host.to_owned(),
            path,
        })
    }

    /// Posts JSON. `timeout` bounds the silence before and within the response.
    pub(crate) fn post(
        &self,
        api_key: &str,
        body: &[u8],
        timeout: Duration,
    ) -> Result<Response, HttpError> {
        let key = format!("Bearer {api_key}");
        let headers = [
            ("Authorization", key.as_str()),
            ("Accept", "*/*"),
            ("User-Agent", "espalier-react"),
        ];
        self.send("POST", &headers, body, timeout)
    }

    /// Sends a request, with a body of JSON unless it is empty. `timeout` as for [`Self::post`].
    pub(crate) fn send(
        &self,
        method: &str,
        headers: &[(&str, &str)],
        body: &[u8],
        timeout: Duration,
    ) -> Result<Response, HttpError> {
        let mut stream = TcpStream::connect_timeout(&self.address, CONNECT_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let mut head = format!("{method} {} HTTP/1.1\r\nHost: {}\r\n", self.path, self.host);
        for (name, value) in headers {
            if value.contains(['\r', '\n']) {
                return Err(HttpError(format!("the header {name} has a line end")));
            }
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !body.is_empty() {
            head.push_str("Content-Type: application/json\r\n");
        }
        head.push_str(&format!(
            "Connection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        ));
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        read_response(&mut BufReader::new(stream))
    }
}

/// The headers up to the empty line.
fn read_headers(from: &mut impl BufRead) -> Result<Headers, HttpError> {
    let mut headers = Headers::new();
    loop {
        let line = read_line(from)?;
        if line.is_empty() {
            return Ok(headers);
        }
        if headers.len() >= HEADERS_MAX {
            return Err(HttpError(format!("more than {HEADERS_MAX} headers")));
        }
        if let Some((name, value)) = line.split_once(':') {
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
}

fn is_chunked(headers: &Headers) -> bool {
    header(headers, "transfer-encoding")
        .is_some_and(|value| value.to_ascii_lowercase().ends_with("chunked"))
}

fn length(headers: &Headers) -> Option<u64> {
    header(headers, "content-length").and_then(|value| value.parse().ok())
}

/// Reads a request. One without a length has no body.
pub(crate) fn read_request(from: &mut impl BufRead) -> Result<Request, HttpError> {
    let line = read_line(from)?;
    let mut words = line.split(' ');
    let (Some(method), Some(path)) = (words.next(), words.next()) else {
        return Err(HttpError(format!("no HTTP request in {line:?}")));
    };
    let headers = read_headers(from)?;
    let mut body = Vec::new();
    if is_chunked(&headers) {
        read_chunks(from, &mut body)?;
    } else if let Some(length) = length(&headers) {
        read_exactly(from, length, &mut body)?;
    }
    Ok(Request {
        method: method.to_owned(),
        path: path.to_owned(),
        headers,
        body,
    })
}

/// Writes a response after which the connection ends.
pub(crate) fn write_response(
    to: &mut impl Write,
    status: u16,
    headers: &[(&str, &str)],
    body: &[u8],
) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {status} {}\r\n", reason(status));
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str(&format!(
        "Connection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    ));
    to.write_all(head.as_bytes())?;
    to.write_all(body)?;
    to.flush()
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        202 => "Accepted",
        400 => "Bad Request",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        _ => "Status",
    }
}

fn read_line(from: &mut impl BufRead) -> Result<String, HttpError> {
    let mut line = Vec::new();
    from.take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
    if line.pop() != Some(b'\n') {
        return Err(HttpError(
            "the connection ended in the middle of the response".to_owned(),
        ));
    }
    Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
}

fn read_exactly(from: &mut impl Read, bytes: u64, body: &mut Vec<u8>) -> Result<(), HttpError> {
    if body.len() as u64 + bytes > BODY_BYTES_MAX {
        return Err(HttpError(format!(
            "the response is over {BODY_BYTES_MAX} bytes"
        )));
    }
    if from.take(bytes).read_to_end(body)? as u64 != bytes {
        return Err(HttpError(
            "the connection ended in the middle of the body".to_owned(),
        ));
    }
    Ok(())
}

fn read_response(from: &mut impl BufRead) -> Result<Response, HttpError> {
    loop {
        let line = read_line(from)?;
        let status = line
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse::<u16>().ok());
        let status = status.ok_or_else(|| HttpError(format!("no HTTP status in {line:?}")))?;
        let headers = read_headers(from)?;
        if (100..200).contains(&status) {
            continue;
        }
        let mut body = Vec::new();
        match length(&headers) {
            _ if is_chunked(&headers) => read_chunks(from, &mut body)?,
            Some(length) => read_exactly(from, length, &mut body)?,
            None => {
                from.take(BODY_BYTES_MAX).read_to_end(&mut body)?;
            }
        }
        return Ok(Response {
            status,
            headers,
            body,
        });
    }
}

fn read_chunks(from: &mut impl BufRead, body: &mut Vec<u8>) -> Result<(), HttpError> {
    loop {
        let line = read_line(from)?;
        let size = line.split(';').next().unwrap_or_default().trim();
        let size = u64::from_str_radix(size, 16)
            .map_err(|_| HttpError(format!("no chunk size in {line:?}")))?;
        if size > 0 {
            read_exactly(from, size, body)?;
        }
        // The line end after a chunk, or the trailer's.
        while !read_line(from)?.is_empty() {}
        if size == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_addresses() {
        let endpoint = Endpoint::parse("http://127.0.0.1:81/r/key/v1/", "/chat/completions");
        let endpoint = endpoint.unwrap();
        assert_eq!(endpoint.address.to_string(), "127.0.0.1:81");
        assert_eq!(endpoint.path, "/r/key/v1/chat/completions");
        assert_eq!(
            Endpoint::parse("http://localhost", "/x")
                .unwrap()
                .address
                .port(),
            80
        );
        for bad in [
            "https://127.0.0.1",
            "http://example.org",
            "http://127.0.0.1:x",
        ] {
            assert!(Endpoint::parse(bad, "").unwrap_err().contains(bad));
        }
    }

    #[test]
    fn responses_of_every_framing_are_read() {
        let read = |text: &str| read_response(&mut text.as_bytes());
        let response =
            read("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhixx");
        assert_eq!(response.unwrap().body, b"hi");
        let chunked = "HTTP/1.1 503 No\r\nTransfer-Encoding: chunked\r\n\r\n3;x\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
        let response = read(chunked).unwrap();
        assert_eq!(
            (response.status, response.body.as_slice()),
            (503, b"abcde".as_slice())
        );
        assert_eq!(read("HTTP/1.1 200 OK\r\n\r\nall").unwrap().body, b"all");
        for broken in [
            "",
            "HTTP/1.1 200",
            "hello\r\n\r\n",
            "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabc",
            "HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\nabc",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nz\r\n",
        ] {
            assert!(read(broken).is_err(), "{broken:?}");
        }
    }
}
