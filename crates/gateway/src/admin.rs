//! The JSON API for other orchestrators. Its own listener, which sandboxes cannot reach, and a
//! bearer token.
//!
//! | request | body | reply |
//! |---|---|---|
//! | `POST /v1/rollouts` | [`NewRollout`], every field optional | `{id, key, path, base_url}` |
//! | `GET /v1/rollouts/{id}` | | [`crate::Status`] |
//! | `POST /v1/rollouts/{id}/settle` | `{quiet_s?, limit_s?}` | [`crate::Status`] |
//! | `POST /v1/rollouts/{id}/close` | `{reward?, disposition?, verdict?}` | the rollout as recorded |
//! | `GET /v1/rollouts/{id}/calls` | | the calls as recorded |
//! | `POST /v1/pause` | `{drain_s?}`: how long to wait until the engine is at work on nothing | `{paused, drained}` |
//! | `POST /v1/resume` | | `{paused}` |
//! | `GET /v1/policy` | | `{version, engines}` |
//! | `POST /v1/policy` | `{folder, version}`: weights that the engines can read | the same |
//! | `GET /healthz` (no token) | | `{ok, rollouts}` |
//! | `GET /metrics` | | Prometheus text |
//!
//! Errors are `{"error": {"message"}}` with 400, 401, 404, 409, 500, or 502 when an engine said no.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::{StatusCode, header};
use record::{
    Disposition, Fault, GroupId, Lineage, Rollout, RolloutId, RolloutSpec, Sampling, Secret,
    StageSeconds, TaskId, Verdict,
};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::serve::{Shared, now_ms};
use crate::session::Session;
use crate::{Access, GatewayError, Open, registry};

const WAIT_S_MAX: f64 = 3600.0;

#[derive(Debug, Clone)]
struct Admin {
    shared: Arc<Shared>,
    token_sum: [u8; 32],
    base: Option<String>,
}

pub(crate) fn router(shared: Arc<Shared>, token: &Secret, base: Option<String>) -> Router {
    let admin = Admin {
        shared,
        // Sums are compared, so that the time of comparison tells nothing of the token.
        token_sum: Sha256::digest(token.expose().as_bytes()).into(),
        base,
    };
    Router::new()
        .route("/v1/rollouts", post(open))
        .route("/v1/rollouts/{id}", get(status))
        .route("/v1/rollouts/{id}/settle", post(settle))
        .route("/v1/rollouts/{id}/close", post(close))
        .route("/v1/rollouts/{id}/calls", get(calls))
        .route("/v1/pause", post(pause))
        .route("/v1/resume", post(resume))
        .route("/v1/policy", get(policy).post(load))
        .route("/metrics", get(metrics))
        .route_layer(axum::middleware::from_fn_with_state(
            admin.clone(),
            authorise,
        ))
        .route("/healthz", get(health))
        .with_state(admin)
}

/// An error towards an orchestrator.
struct Problem(StatusCode, String);

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        (self.0, Json(json!({"error": {"message": self.1}}))).into_response()
    }
}

impl From<GatewayError> for Problem {
    fn from(error: GatewayError) -> Self {
        let status = match error {
            GatewayError::UnknownRollout(_) => StatusCode::NOT_FOUND,
            GatewayError::RolloutOpen(_) => StatusCode::CONFLICT,
            GatewayError::TooManyRollouts { .. } => StatusCode::TOO_MANY_REQUESTS,
            GatewayError::Key => StatusCode::BAD_REQUEST,
            GatewayError::Weights(_) => StatusCode::BAD_GATEWAY,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self(status, error.to_string())
    }
}

impl From<ledger::LedgerError> for Problem {
    fn from(error: ledger::LedgerError) -> Self {
        Self(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    }
}

fn bad(message: impl Into<String>) -> Problem {
    Problem(StatusCode::BAD_REQUEST, message.into())
}

async fn authorise(
    State(admin): State<Admin>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let token = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.strip_prefix("Bearer "))
        .unwrap_or_default();
    let sum: [u8; 32] = Sha256::digest(token.as_bytes()).into();
    if sum == admin.token_sum {
        Ok(next.run(request).await)
    } else {
        Err(Problem(
            StatusCode::UNAUTHORIZED,
            "expected the admin token as `Authorization: Bearer …`".to_owned(),
        ))
    }
}

/// A body that may be empty.
async fn optional<T: Default + serde::de::DeserializeOwned>(
    request: Request,
) -> Result<T, Problem> {
    const BYTES_MAX: usize = 1 << 20;
    let body = axum::body::to_bytes(request.into_body(), BYTES_MAX)
        .await
        .map_err(|error| bad(error.to_string()))?;
    if body.trim_ascii().is_empty() {
        return Ok(T::default());
    }
    // Through an object: the derived readers would take a list of values as well.
    serde_json::from_slice::<serde_json::Map<String, Value>>(&body)
        .and_then(|object| serde_json::from_value(Value::Object(object)))
        .map_err(|error| bad(format!("request body: {error}")))
}

/// Limits of a rollout.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Limits {
    calls_max: Option<u32>,
    generated_tokens_max: Option<u64>,
    seconds_max: Option<u64>,
}

/// A rollout that another orchestrator starts.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct NewRollout {
    id: Option<RolloutId>,
    task: Option<TaskId>,
    group: Option<GroupId>,
    harness: Option<String>,
    labels: BTreeMap<String, String>,
    seed: u64,
    sampling: Option<Sampling>,
    sampling_fixed: bool,
    limits: Limits,
}

async fn open(State(admin): State<Admin>, request: Request) -> Result<Json<Value>, Problem> {
    let new: NewRollout = optional(request).await?;
    let name = |text: String| RolloutId::new(text).map_err(|error| bad(error.to_string()));
    let id = match new.id {
        Some(id) => id,
        None => name(format!("rollout-{}", registry::random_key()?))?,
    };
    let task = match new.task {
        Some(task) => task,
        None => TaskId::new("unknown").map_err(|error| bad(error.to_string()))?,
    };
    let group = match new.group {
        Some(group) => group,
        None => GroupId::new(task.as_str()).map_err(|error| bad(error.to_string()))?,
    };
    let spec = RolloutSpec {
        id: id.clone(),
        task,
        group,
        harness: new.harness.unwrap_or_else(|| "unknown".to_owned()),
        labels: new.labels,
        seed: new.seed,
    };
    if admin.shared.registry.session(&id).is_none() && admin.shared.ledger.rollout(&id)?.is_some() {
        return Err(Problem(
            StatusCode::CONFLICT,
            format!("rollout {id} is in the ledger already: use another id"),
        ));
    }
    let usual = Open::new(spec);
    let open = Open {
        sampling: new.sampling.unwrap_or_else(|| usual.sampling.clone()),
        sampling_fixed: new.sampling_fixed,
        calls_max: new.limits.calls_max.unwrap_or(usual.calls_max),
        generated_tokens_max: new.limits.generated_tokens_max,
        seconds_max: new.limits.seconds_max,
        ..usual
    };
    let access = open_noted(&admin.shared, open).await?;
    let base_url = admin
        .base
        .as_ref()
        .map(|base| format!("{base}{}/v1", access.path));
    Ok(Json(json!({
        "id": id, "key": access.key, "path": access.path, "base_url": base_url,
    })))
}

/// Opens a rollout and notes it in the ledger.
pub(crate) async fn open_noted(shared: &Shared, open: Open) -> Result<Access, GatewayError> {
    let id = open.spec.id.clone();
    let (access, session) = shared.registry.open(open)?;
    let saved = shared.ledger.put_rollout(rollout(shared, &session)).await;
    if let Err(error) = saved {
        shared.registry.close(&id);
        return Err(error.into());
    }
    Ok(access)
}

fn rollout(shared: &Shared, session: &Session) -> Rollout {
    Rollout {
        spec: RolloutSpec::clone(&session.spec),
        lineage: Lineage {
            espalier: crate::VERSION.to_owned(),
            gateway: crate::VERSION.to_owned(),
            codec_digest: shared.codec.digest().to_owned(),
            policy: shared.engine.policy_version(),
            sampling: Some(session.sampling.clone()),
            ..Lineage::default()
        },
        started_ms: session.started_ms,
        finished_ms: None,
        harness_exit: None,
        harness_tail: String::new(),
        calls: session.status().calls,
        seconds: StageSeconds::default(),
        verdict: None,
        disposition: None,
    }
}

/// Adds to the lineage what only the calls tell.
async fn trace(shared: &Shared, rollout: &mut Rollout) -> Result<(), Problem> {
    let (ledger, id) = (shared.ledger.clone(), rollout.spec.id.clone());
    let read = tokio::task::spawn_blocking(move || {
        let calls = ledger.calls_intact(&id)?.0;
        Ok::<_, ledger::LedgerError>((ledger.rollout(&id)?, calls))
    });
    let (started, calls) = read
        .await
        .map_err(|error| Problem(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))??;
    if let Some(started) = started {
        rollout.lineage.policy = started.lineage.policy;
    }
    rollout.lineage.tools_digests = wire::digest::tools_of_calls(&calls);
    rollout.lineage.note_policies(&calls);
    rollout.lineage.policy_end = Some(shared.engine.policy_version());
    Ok(())
}

fn known(id: &str) -> Result<RolloutId, Problem> {
    RolloutId::new(id).map_err(|error| bad(error.to_string()))
}

async fn status(
    State(admin): State<Admin>,
    Path(id): Path<String>,
) -> Result<Json<crate::Status>, Problem> {
    let id = known(&id)?;
    admin
        .shared
        .registry
        .status(&id)
        .map(Json)
        .ok_or_else(|| GatewayError::UnknownRollout(id).into())
}

fn seconds(name: &str, value: f64) -> Result<Duration, Problem> {
    if (0.0..=WAIT_S_MAX).contains(&value) {
        Ok(Duration::from_secs_f64(value))
    } else {
        Err(bad(format!(
            "{name}: expected 0 to {WAIT_S_MAX} seconds, found {value}"
        )))
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settle {
    quiet_s: f64,
    limit_s: f64,
}

impl Default for Settle {
    fn default() -> Self {
        Self {
            quiet_s: 0.5,
            limit_s: 30.0,
        }
    }
}

async fn settle(
    State(admin): State<Admin>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<crate::Status>, Problem> {
    let id = known(&id)?;
    let wish: Settle = optional(request).await?;
    let (quiet, limit) = (
        seconds("quiet_s", wish.quiet_s)?,
        seconds("limit_s", wish.limit_s)?,
    );
    Ok(Json(admin.shared.registry.settle(&id, quiet, limit).await?))
}

/// How a rollout ended.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Close {
    reward: Option<f64>,
    disposition: Option<Disposition>,
    verdict: Option<Verdict>,
}

async fn close(
    State(admin): State<Admin>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Rollout>, Problem> {
    let id = known(&id)?;
    let end: Close = optional(request).await?;
    let verdict = match (end.verdict, end.reward) {
        (Some(_), Some(_)) => return Err(bad("expected a reward or a verdict, found both")),
        (Some(verdict), None) => Some(verdict),
        (None, Some(reward)) => Some(Verdict {
            reward,
            scores: BTreeMap::new(),
            evidence: String::new(),
            seconds: 0.0,
        }),
        (None, None) => None,
    };
    if let Some(verdict) = &verdict
        && !(0.0..=1.0).contains(&verdict.reward)
    {
        return Err(bad(format!(
            "reward: expected 0 to 1, found {}",
            verdict.reward
        )));
    }
    let disposition = match (end.disposition, &verdict) {
        (Some(disposition), None) if disposition.has_vote() => {
            return Err(bad(format!(
                "a rollout whose disposition is `{}` needs a reward",
                disposition.name()
            )));
        }
        (Some(disposition), _) => disposition,
        (None, Some(_)) => Disposition::Train,
        (None, None) => return Err(bad("expected a reward, a verdict or a disposition")),
    };
    let Some(session) = admin.shared.registry.close(&id) else {
        return Err(GatewayError::UnknownRollout(id).into());
    };
    let mut record = rollout(&admin.shared, &session);
    trace(&admin.shared, &mut record).await?;
    if verdict.is_some() {
        record.lineage.reward_source = "orchestrator".to_owned();
    }
    // A harness that never called the model was not tested, whatever the verifier says (I7).
    let no_calls = record.calls == 0 && disposition.has_vote();
    let record = Rollout {
        finished_ms: Some(now_ms()),
        disposition: Some(if no_calls {
            Disposition::Discard {
                fault: Fault::NoCalls,
                reason:
                    "no call was captured: does the harness use the base URL and key it was given?"
                        .to_owned(),
            }
        } else {
            disposition
        }),
        verdict,
        ..record
    };
    admin.shared.ledger.put_rollout(record.clone()).await?;
    Ok(Json(record))
}

async fn calls(
    State(admin): State<Admin>,
    Path(id): Path<String>,
) -> Result<Json<Vec<record::Call>>, Problem> {
    let id = known(&id)?;
    let ledger = admin.shared.ledger.clone();
    let read = tokio::task::spawn_blocking(move || ledger.calls(&id)).await;
    let calls =
        read.map_err(|error| Problem(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))??;
    Ok(Json(calls))
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Pause {
    drain_s: f64,
}

async fn pause(State(admin): State<Admin>, request: Request) -> Result<Json<Value>, Problem> {
    let wish: Pause = optional(request).await?;
    let limit = seconds("drain_s", wish.drain_s)?;
    admin.shared.paused.send_replace(true);
    let drained = admin.shared.drained(limit).await;
    Ok(Json(json!({"paused": true, "drained": drained})))
}

async fn policy(State(admin): State<Admin>) -> Json<Value> {
    Json(shown_policy(&admin.shared))
}

fn shown_policy(shared: &Shared) -> Value {
    let members = shared.engine.members();
    let engines: Vec<Value> = members
        .iter()
        .map(|member| {
            json!({"name": member.name, "up": member.up, "in_flight": member.in_flight,
                "requests": member.requests, "outages": member.outages})
        })
        .collect();
    json!({"version": shared.engine.policy_version(), "engines": engines})
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Load {
    folder: Option<std::path::PathBuf>,
    version: Option<record::PolicyVersion>,
}

async fn load(State(admin): State<Admin>, request: Request) -> Result<Json<Value>, Problem> {
    let wish: Load = optional(request).await?;
    let (Some(folder), Some(version)) = (wish.folder, wish.version) else {
        return Err(bad("expected `folder` and `version`"));
    };
    admin.shared.load_weights(&folder, version).await?;
    Ok(Json(shown_policy(&admin.shared)))
}

async fn resume(State(admin): State<Admin>) -> Json<Value> {
    admin.shared.paused.send_replace(false);
    Json(json!({"paused": false}))
}

async fn health(State(admin): State<Admin>) -> Json<Value> {
    Json(json!({"ok": true, "rollouts": admin.shared.metrics.rollouts.get()}))
}

async fn metrics(State(admin): State<Admin>) -> String {
    admin.shared.metrics_text()
}
