//! Whether the engines and judges that a recipe names, or somebody on the command line, are there.

use std::{path::Path, time::Duration};

use engine::{
    EngineError,
    remote::{self, Endpoint},
    scripted::Replay,
};

use super::{Line, chain, lacking, ok, policy_lines};
use crate::{error::CliError, recipe::Recipe};

/// A server that takes longer than this to list its models is as good as gone.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Models that are named.
const NAMES_MAX: usize = 3;

/// A line or more for each engine and for the judges.
pub(super) async fn lines(recipe: Option<&Recipe>, more: &[String]) -> Vec<Line> {
    let models = recipe.into_iter().flat_map(|recipe| &recipe.eval.models);
    let named = models.map(|model| (model.name.as_str(), model.engine.as_str()));
    let mut lines = Vec::new();
    for (name, engine) in more.iter().map(|engine| ("", engine.as_str())).chain(named) {
        let title = match name {
            "" => format!("engine {engine}"),
            name => format!("engine {name}"),
        };
        lines.extend(look(title, engine).await);
    }
    lines.extend(recipe.and_then(|recipe| judges(recipe.verify.panel().map(|p| p.is_some()))));
    lines
}

fn judges(panel: Result<bool, CliError>) -> Option<Line> {
    match panel {
        Ok(false) => None,
        Ok(true) => Some(ok("judges", "their keys are set; they were not asked")),
        Err(error) => Some(lacking(
            true,
            "judges",
            chain(&error),
            "tasks with rubrics have no verdict",
            "correct [verify.judge], or set the variable that it names",
        )),
    }
}

/// Looks at KIND:WHERE.
async fn look(title: String, engine: &str) -> Vec<Line> {
    let (kind, place) = engine.split_once(':').unwrap_or((engine, ""));
    let server = |path: &'static str| ask(place, path);
    let found = match kind {
        "vllm" | "sglang" => server("/v1/models").await,
        "openai" => server("/models").await,
        "embedded" => {
            let mut lines = policy_lines(Path::new(place));
            for line in &mut lines {
                line.name = format!("{title}: {}", line.name);
            }
            return lines;
        }
        "scripted" => match Replay::load(Path::new(place)) {
            Ok(_) => Ok("its replies can be read".to_owned()),
            Err(error) => Err(error.to_string()),
        },
        "teacher" => Ok("plays the tasks' own solutions".to_owned()),
        _ => Err(format!(
            "{engine:?}: expected vllm:, sglang:, openai:, embedded: or scripted: and where, or teacher"
        )),
    };
    vec![match found {
        Ok(found) => ok(title, found),
        Err(reason) => lacking(
            true,
            title,
            reason,
            "nothing that needs this engine can run",
            "start the server, or correct its address or kind",
        ),
    }]
}

async fn ask(url: &str, path: &str) -> Result<String, String> {
    let endpoint = Endpoint {
        timeout: ANSWER_TIMEOUT,
        ..Endpoint::new(url)
    };
    match remote::models(endpoint, path).await {
        Ok(names) if names.is_empty() => Err(format!("{url} answers and has no model")),
        Ok(names) => {
            let more = match names.len().saturating_sub(NAMES_MAX) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let names = names.get(..NAMES_MAX).unwrap_or(&names).join(", ");
            Ok(format!("{url} serves {names}{more}"))
        }
        // It is there and wants a key, which is given where it is used.
        Err(EngineError::Invalid(reason))
            if ["status 401", "status 403"]
                .iter()
                .any(|s| reason.contains(s)) =>
        {
            Ok(format!("{url} answers, and wants a key"))
        }
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;
    use crate::commands::doctor::State;

    /// A server that gives one answer to everything.
    fn server(status: &'static str, body: &'static str) -> String {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let _ = stream.read(&mut [0; 4096]);
                let length = body.len();
                let _ = write!(
                    stream,
                    "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
                );
            }
        });
        format!("http://{address}")
    }

    async fn found(engine: &str) -> (State, String) {
        let line = look("engine".into(), engine).await.remove(0);
        (line.state, line.found)
    }

    #[tokio::test]
    async fn an_engine_is_asked_what_it_serves() {
        let url = server("200 OK", r#"{"data": [{"id": "a"}, {"id": "b"}]}"#);
        for kind in ["vllm", "sglang", "openai"] {
            let (state, text) = found(&format!("{kind}:{url}")).await;
            assert_eq!((state, text), (State::Ok, format!("{url} serves a, b")));
        }
        let empty = server("200 OK", r#"{"data": []}"#);
        assert_eq!(found(&format!("vllm:{empty}")).await.0, State::Missing);
        let shut = server("401 Unauthorized", r#"{"error": {"message": "no key"}}"#);
        let (state, text) = found(&format!("openai:{shut}")).await;
        assert_eq!(state, State::Ok, "{text}");
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = closed.local_addr().unwrap();
        drop(closed);
        assert_eq!(
            found(&format!("vllm:http://{address}")).await.0,
            State::Missing
        );
        for wrong in [
            "vllm:nowhere",
            "magic:wand",
            "scripted:/no/such/file",
            "embedded:/no",
        ] {
            assert_eq!(found(wrong).await.0, State::Missing, "{wrong}");
        }
        assert_eq!(found("teacher:0.5").await.0, State::Ok);
    }
}
