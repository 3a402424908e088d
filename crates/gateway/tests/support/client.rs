//! An HTTP/1.1 client of a hundred lines: no retries, no pool, nothing hidden.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpStream, UnixStream};

trait Socket: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Socket for T {}

pub struct Client {
    stream: BufReader<Box<dyn Socket>>,
}

#[derive(Debug, Clone)]
pub struct Head {
    pub status: u16,
    pub headers: Vec<(String, String)>,
}

impl Head {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(other, _)| other == name)
            .map(|(_, value)| value.as_str())
    }
}

#[derive(Debug, Clone)]
pub struct Answer {
    pub head: Head,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.head.status
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// `error.code` of an error, else its type.
    pub fn code(&self) -> String {
        let error = &self.json()["error"];
        let code = error["code"].as_str().or_else(|| error["type"].as_str());
        code.unwrap_or_else(|| panic!("{error}")).to_owned()
    }

    pub fn message(&self) -> Value {
        self.json()["choices"][0]["message"].clone()
    }
}

impl Client {
    pub async fn tcp(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self {
            stream: BufReader::new(Box::new(stream)),
        }
    }

    pub async fn unix(path: &Path) -> Self {
        let stream = UnixStream::connect(path).await.unwrap();
        Self {
            stream: BufReader::new(Box::new(stream)),
        }
    }

    pub async fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> std::io::Result<()> {
        let mut head = format!(
            "{method} {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n",
            body.len()
        );
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body);
        self.stream.write_all(&bytes).await?;
        self.stream.flush().await
    }

    async fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end().to_owned())
    }

    pub async fn head(&mut self) -> std::io::Result<Head> {
        let first = self.line().await?;
        let status = first
            .split(' ')
            .nth(1)
            .and_then(|text| text.parse().ok())
            .ok_or(std::io::ErrorKind::InvalidData)?;
        let mut headers = Vec::new();
        loop {
            let line = self.line().await?;
            match line.split_once(": ") {
                Some((name, value)) => headers.push((name.to_lowercase(), value.to_owned())),
                None => return Ok(Head { status, headers }),
            }
        }
    }

    /// The next chunk of a chunked body; `None` at its end.
    pub async fn chunk(&mut self) -> std::io::Result<Option<Vec<u8>>> {
        let size = self.line().await?;
        let size = usize::from_str_radix(&size, 16).map_err(|_| std::io::ErrorKind::InvalidData)?;
        let mut bytes = vec![0; size + 2];
        self.stream.read_exact(&mut bytes).await?;
        bytes.truncate(size);
        Ok((size > 0).then_some(bytes))
    }

    pub async fn answer(&mut self) -> std::io::Result<Answer> {
        let head = self.head().await?;
        let mut body = Vec::new();
        if let Some(length) = head.header("content-length") {
            body = vec![
                0;
                length
                    .parse()
                    .map_err(|_| std::io::ErrorKind::InvalidData)?
            ];
            self.stream.read_exact(&mut body).await?;
        } else if head.header("transfer-encoding").is_some() {
            while let Some(chunk) = self.chunk().await? {
                body.extend(chunk);
            }
        }
        Ok(Answer { head, body })
    }

    pub async fn post(&mut self, path: &str, headers: &[(&str, &str)], body: &Value) -> Answer {
        self.send("POST", path, headers, body.to_string().as_bytes())
            .await
            .unwrap();
        self.answer().await.unwrap()
    }

    pub async fn get(&mut self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.send("GET", path, headers, b"").await.unwrap();
        self.answer().await.unwrap()
    }
}
