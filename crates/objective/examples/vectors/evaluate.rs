//! From a case's function name, inputs and settings to our values in the shape of the file.

use objective::{
    AdaptiveKl, Aggregation, Bounds, Divergence, Gather, KlEstimator, Level, Lone, Matrix, Metrics,
    PolicyInputs, PolicyLoss, Rejection, Scale, TokenBaselineInputs, TrlInputs, TrlLoss,
    TrlSettings, Whole, correction_weights, covariance_choices, covariance_loss, entropy, gae,
    gdpo_single, gpg, grpo, grpo_pass_at_k, kl_token, logprob, off_policy_metrics, opo,
    optimal_token_baseline, policy_loss, reinforce_plus_plus, reinforce_plus_plus_baseline,
    rejection_mask, remax, rewards_with_kl, rloo, token_weights_within, trl_loss, value_loss,
    weight_matrix,
};
use serde_json::{Map, Value, json};

type Object = Map<String, Value>;

/// Access to inputs and settings with words for what is missing.
struct Case<'a> {
    inputs: &'a Object,
    params: &'a Object,
}

impl Case<'_> {
    fn input(&self, name: &str) -> Result<&Value, String> {
        self.inputs
            .get(name)
            .or_else(|| self.params.get(name))
            .ok_or_else(|| format!("no input {name}"))
    }

    fn matrix(&self, name: &str) -> Result<Matrix, String> {
        let rows: Vec<Vec<f64>> = serde_json::from_value(self.input(name)?.clone())
            .map_err(|error| format!("input {name} is not a matrix: {error}"))?;
        Matrix::from_rows(&rows).map_err(|error| error.to_string())
    }

    fn vector(&self, name: &str) -> Result<Vec<f64>, String> {
        serde_json::from_value(self.input(name)?.clone())
            .map_err(|error| format!("input {name} is not a vector: {error}"))
    }

    fn groups(&self) -> Result<Vec<u64>, String> {
        Ok(self
            .vector("index")?
            .iter()
            .map(|group| *group as u64)
            .collect())
    }

    fn mask(&self) -> Result<Matrix, String> {
        self.matrix("response_mask")
    }

    fn optional(&self, name: &str) -> Option<f64> {
        self.params.get(name).and_then(Value::as_f64)
    }

    fn number(&self, name: &str) -> Result<f64, String> {
        self.optional(name)
            .ok_or_else(|| format!("no setting {name}"))
    }

    fn flag(&self, name: &str) -> Result<bool, String> {
        self.params
            .get(name)
            .and_then(Value::as_bool)
            .ok_or_else(|| format!("no setting {name}"))
    }

    fn text(&self, name: &str) -> Result<&str, String> {
        self.params
            .get(name)
            .and_then(Value::as_str)
            .ok_or_else(|| format!("no setting {name}"))
    }

    fn scale(&self) -> Result<Scale, String> {
        Ok(if self.flag("norm_adv_by_std")? {
            Scale::Std
        } else {
            Scale::None
        })
    }

    /// A mode of aggregation as weights per token.
    fn weights(&self, mode: &str, mask: &Matrix) -> Result<Matrix, String> {
        let whole = Whole {
            tokens: self.optional("batch_num_tokens"),
            rollouts: self.optional("global_batch_size"),
        };
        let counts = mask.counts();
        let own = counts.iter().filter(|count| **count > 0).count() as f64;
        let rollouts = whole.rollouts.unwrap_or(own);
        let width = mask.columns() as f64;
        let aggregation = match mode {
            "token-mean" => Aggregation::TokenMean,
            "token-sum" => Aggregation::Fixed(1.0),
            "seq-mean-token-sum" => Aggregation::RolloutSum,
            "seq-mean-token-mean" => Aggregation::RolloutMean,
            "seq-mean-token-sum-norm" => {
                Aggregation::Fixed(rollouts * self.optional("loss_scale_factor").unwrap_or(width))
            }
            other => return Err(format!("unknown aggregation {other}")),
        };
        // Data-parallel replicas average their gradients, so each scales its part up.
        let replicas = self.optional("dp_size").unwrap_or(1.0);
        let weights: Vec<f64> = token_weights_within(&counts, aggregation, &whole)
            .iter()
            .map(|weight| weight * replicas)
            .collect();
        Ok(weight_matrix(mask, &weights))
    }
}

fn rows(matrix: &Matrix) -> Value {
    (0..matrix.rows())
        .map(|row| {
            json!(
                matrix
                    .row(row)
                    .iter()
                    .map(|&v| plain(v))
                    .collect::<Vec<_>>()
            )
        })
        .collect()
}

/// JSON has no word for what is not finite.
fn plain(value: f64) -> Value {
    if value.is_nan() {
        json!("nan")
    } else if value.is_infinite() {
        json!(if value > 0.0 { "inf" } else { "-inf" })
    } else {
        json!(value)
    }
}

fn named(metrics: &Metrics, prefix: &str) -> Value {
    metrics
        .iter()
        .map(|(name, value)| (format!("{prefix}{name}"), plain(*value)))
        .collect::<Object>()
        .into()
}

fn weighted_sum(values: &Matrix, weights: &Matrix) -> f64 {
    let both = values.values().iter().zip(weights.values());
    both.map(|(value, weight)| value * weight).sum()
}

/// Our values for a case. `expected` only tells which of several values are asked for.
pub(super) fn evaluate(
    function: &str,
    inputs: &Object,
    params: &Object,
    expected: &Value,
) -> Result<Value, String> {
    let case = Case { inputs, params };
    match function {
        "agg_loss" | "masked_mean" | "masked_var" | "masked_whiten" => statistic(function, &case),
        "vanilla" | "gspo" | "cispo" | "sapo" | "geo_mean" | "gpg" | "dro" | "dppo_tv"
        | "dppo_kl" | "kl_cov" | "reinforce"
            if inputs.contains_key("log_prob") =>
        {
            policy(function, &case, expected)
        }
        "is_weights" | "rejection_mask" | "offpolicy_metrics" | "correction_and_rejection" => {
            correction(function, &case)
        }
        "trl_grpo" => trl(&case),
        "value_loss"
        | "kl_penalty"
        | "rewards_with_kl"
        | "adaptive_kl_controller"
        | "entropy"
        | "logprobs_from_logits" => others(function, &case, expected),
        _ => advantages(function, &case),
    }
}

fn statistic(function: &str, case: &Case<'_>) -> Result<Value, String> {
    let mask = case.mask()?;
    let values = case.matrix(case.text("matrix")?)?;
    Ok(match function {
        "agg_loss" => {
            let weights = case.weights(case.text("mode")?, &mask)?;
            json!(weighted_sum(&values, &weights))
        }
        "masked_mean" => json!(values.masked_mean(&mask)),
        "masked_var" if case.flag("unbiased")? => json!(values.masked_variance(&mask)),
        "masked_whiten" => rows(&values.masked_whiten(&mask, case.flag("shift_mean")?)),
        _ => return Err("biased variance is not offered".to_owned()),
    })
}

fn advantages(function: &str, case: &Case<'_>) -> Result<Value, String> {
    let mask = case.mask()?;
    let rewards = match case.params.get("rewards").and_then(Value::as_str) {
        Some(name) => case.matrix(name)?,
        None => case.matrix("token_level_rewards")?,
    };
    let groups = case.groups()?;
    let same = |advantages: Matrix| (advantages.clone(), advantages);
    let (advantages, returns) = match function {
        "grpo" => same(grpo(&rewards, &mask, &groups, case.scale()?, Lone::Reward)),
        "grpo_passk" => {
            // The file joins the lone rollout to the group before it.
            let joined: Vec<u64> = groups.iter().map(|&g| if g == 3 { 2 } else { g }).collect();
            same(grpo_pass_at_k(&rewards, &mask, &joined, case.scale()?))
        }
        "rloo" => same(rloo(&rewards, &mask, &groups, Lone::Reward)),
        "rloo_vectorized" => same(rloo(&rewards, &mask, &groups, Lone::Zero)),
        "opo" => same(opo(&rewards, &mask, &groups)),
        "gpg" => same(gpg(&rewards, &mask, &groups, case.number("f_norm")?)),
        "remax" => remax(&rewards, &mask, &case.vector("reward_baselines")?),
        "reinforce_plus_plus_baseline" => {
            same(reinforce_plus_plus_baseline(&rewards, &mask, &groups))
        }
        "gdpo_single_reward" => same(gdpo_single(&rewards, &mask, &groups)),
        "reinforce_plus_plus" => reinforce_plus_plus(&rewards, &mask, case.number("gamma")?),
        "gae" => {
            let values = case.matrix("values")?;
            let (gamma, lambda) = (case.number("gamma")?, case.number("lam")?);
            let (advantages, returns) = gae(&rewards, &values, &mask, gamma, lambda);
            (advantages.masked_whiten(&mask, true), returns)
        }
        "optimal_token_baseline" | "tir_optimal_token_baseline" => {
            let (old, squares) = (case.matrix("old_log_prob")?, case.matrix("sum_pi_squared")?);
            let weights = case.matrix("rollout_is_weights")?;
            let inputs = TokenBaselineInputs {
                rewards: &rewards,
                mask: &mask,
                groups: &groups,
                old: &old,
                squares: &squares,
                weights: case.flag("is_weights")?.then_some(&weights),
            };
            optimal_token_baseline(&inputs, function.starts_with("tir"))
        }
        _ => return Err("unknown function".to_owned()),
    };
    Ok(json!({ "advantages": rows(&advantages), "returns": rows(&returns) }))
}

fn policy(function: &str, case: &Case<'_>, expected: &Value) -> Result<Value, String> {
    let (low, high) = (
        case.number("clip_ratio_low"),
        case.number("clip_ratio_high"),
    );
    let kind = match function {
        "vanilla" => PolicyLoss::Clipped {
            low: low?,
            high: high?,
            dual: case.optional("clip_ratio_c"),
        },
        "gspo" => PolicyLoss::Sequence {
            low: low?,
            high: high?,
        },
        "cispo" => PolicyLoss::Weighted {
            low: low?,
            high: high?,
        },
        "sapo" => PolicyLoss::Soft {
            positive: case.number("tau_pos")?,
            negative: case.number("tau_neg")?,
        },
        "geo_mean" => PolicyLoss::GeometricMean {
            low: low?,
            high: high?,
        },
        "gpg" | "reinforce" => PolicyLoss::Plain,
        "dro" => PolicyLoss::Quadratic {
            beta: case.number("dro_beta")?,
        },
        "dppo_tv" => PolicyLoss::TotalVariation {
            low: low?,
            high: high?,
            cap: case.number("clip_ratio_c")?,
        },
        "dppo_kl" => PolicyLoss::BinaryKl {
            low: low?,
            high: high?,
            cap: case.number("clip_ratio_c")?,
        },
        "kl_cov" => PolicyLoss::Covariance {
            share: case.number("kl_cov_ratio")?,
            price: case.number("ppo_kl_coef")?,
        },
        _ => return Err("unknown function".to_owned()),
    };
    let mask = case.mask()?;
    let (new, old) = (case.matrix("log_prob")?, case.matrix("old_log_prob")?);
    let advantages = case.matrix(case.text("adv")?)?;
    let correction = case.matrix("rollout_is_weights")?;
    let weights = case.weights(case.text("agg")?, &mask)?;
    let inputs = PolicyInputs {
        logprob: &new,
        old: &old,
        advantages: &advantages,
        mask: &mask,
        correction: case.flag("is_weights")?.then_some(&correction),
        weights: &weights,
    };
    let result = match kind {
        // Tokens that tie for the last place are as good as each other; the file holds the
        // choice of one sorting routine. Take the choice that comes nearest to its loss.
        PolicyLoss::Covariance { share, price } => {
            let aim = expected["loss"].as_f64().unwrap_or(f64::NAN);
            covariance_choices(&inputs, share, 1000)
                .iter()
                .map(|chosen| covariance_loss(&inputs, chosen, price))
                .min_by(|a, b| (a.loss - aim).abs().total_cmp(&(b.loss - aim).abs()))
                .ok_or("no token to choose")?
        }
        _ => policy_loss(&kind, &inputs),
    };
    Ok(json!({
        "loss": plain(result.loss),
        "grad_log_prob": rows(&result.gradient),
        "metrics": named(&result.metrics, ""),
    }))
}

fn bounds(value: &Value) -> Result<Bounds, String> {
    match value {
        Value::String(text) => match text.split_once('_') {
            Some((low, high)) => Ok(Bounds::Zero {
                low: parse(low)?,
                high: parse(high)?,
            }),
            None => Ok(Bounds::Truncate(parse(text)?)),
        },
        _ => value
            .as_f64()
            .map(Bounds::Truncate)
            .ok_or_else(|| format!("threshold {value} is no number")),
    }
}

fn parse(text: &str) -> Result<f64, String> {
    text.trim()
        .parse()
        .map_err(|_| format!("threshold {text:?} is no number"))
}

fn rejections(modes: &str, thresholds: &Value) -> Result<Vec<Rejection>, String> {
    let text = match thresholds {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let modes: Vec<&str> = modes.split(',').map(str::trim).collect();
    let mut specs: Vec<&str> = text.split(',').map(str::trim).collect();
    if specs.len() == 1 {
        specs = vec![specs[0]; modes.len()];
    }
    modes
        .iter()
        .zip(specs)
        .map(|(mode, spec)| {
            let (gather, divergence) = mode
                .rsplit_once('_')
                .ok_or_else(|| format!("unknown mode {mode}"))?;
            let (low, high) = match spec.split_once('_') {
                Some((low, high)) => (Some(parse(low)?), parse(high)?),
                None => (None, parse(spec)?),
            };
            Ok(Rejection {
                name: (*mode).to_owned(),
                gather: match gather {
                    "token" => Gather::Token,
                    "seq_sum" => Gather::Sum,
                    "seq_mean" => Gather::Mean,
                    "seq_max" => Gather::Max,
                    _ => return Err(format!("unknown mode {mode}")),
                },
                divergence: match divergence {
                    "k1" => Divergence::K1,
                    "k2" => Divergence::K2,
                    "k3" => Divergence::K3,
                    _ => return Err(format!("unknown mode {mode}")),
                },
                low,
                high,
            })
        })
        .collect()
}

fn level(text: &str) -> Result<Level, String> {
    match text {
        "token" => Ok(Level::Token),
        "sequence" => Ok(Level::Sequence),
        other => Err(format!("unknown level {other}")),
    }
}

fn correction(function: &str, case: &Case<'_>) -> Result<Value, String> {
    let mask = case.mask()?;
    let (old, rollout) = (
        case.matrix("old_log_prob")?,
        case.matrix("rollout_log_prob")?,
    );
    let log_ratio = Matrix::from_rows(
        &(0..old.rows())
            .map(|row| {
                let pairs = old.row(row).iter().zip(rollout.row(row));
                pairs.map(|(old, rollout)| old - rollout).collect()
            })
            .collect::<Vec<_>>(),
    )
    .map_err(|error| error.to_string())?;
    let setting = |name: &str| case.params.get(name).unwrap_or(&Value::Null);
    Ok(match function {
        "is_weights" => {
            let result = correction_weights(
                &log_ratio,
                &mask,
                level(case.text("level")?)?,
                bounds(setting("threshold"))?,
                case.flag("batch_normalize")?,
            );
            match result {
                Ok(result) => json!({
                    "weights": rows(&result.weights),
                    "metrics": named(&result.metrics, ""),
                }),
                Err(error) => json!({ "error": error.to_string() }),
            }
        }
        "rejection_mask" => {
            let conditions = rejections(case.text("mode")?, setting("threshold"))?;
            let (kept, metrics) = rejection_mask(&log_ratio, &mask, &conditions);
            json!({ "mask": rows(&kept), "metrics": named(&metrics, "") })
        }
        "offpolicy_metrics" => named(&off_policy_metrics(&old, &rollout, &mask), ""),
        _ => {
            let mut metrics = off_policy_metrics(&old, &rollout, &mask);
            let mut found = Object::new();
            if let Some(text) = setting("rollout_is").as_str() {
                let own = bounds(setting("rollout_is_threshold"))?;
                let normalise = setting("rollout_is_batch_normalize") == &json!(true);
                let result = correction_weights(&log_ratio, &mask, level(text)?, own, normalise)
                    .map_err(|error| error.to_string())?;
                metrics.extend(result.metrics);
                found.insert("weights".to_owned(), rows(&result.weights));
            }
            let conditions = match setting("rollout_rs").as_str() {
                Some(modes) => rejections(modes, setting("rollout_rs_threshold"))?,
                None => Vec::new(),
            };
            let (kept, own) = rejection_mask(&log_ratio, &mask, &conditions);
            metrics.extend(own);
            found.insert("mask".to_owned(), rows(&kept));
            found.insert("metrics".to_owned(), named(&metrics, "rollout_corr/"));
            found.into()
        }
    })
}

fn trl(case: &Case<'_>) -> Result<Value, String> {
    let pair =
        |a: &str, b: &str| -> Result<(f64, f64), String> { Ok((case.number(a)?, case.number(b)?)) };
    let loss = match case.text("loss_type")? {
        "grpo" => TrlLoss::Grpo,
        "bnpo" => TrlLoss::Bnpo,
        "dr_grpo" => TrlLoss::DrGrpo,
        "dapo" => TrlLoss::Dapo,
        "luspo" => TrlLoss::Luspo,
        "cispo" => TrlLoss::Cispo,
        "sapo" => TrlLoss::Sapo {
            positive: case.number("sapo_temperature_pos")?,
            negative: case.number("sapo_temperature_neg")?,
        },
        "vespo" => TrlLoss::Vespo {
            positive: pair("vespo_k_pos", "vespo_lambda_pos")?,
            negative: pair("vespo_k_neg", "vespo_lambda_neg")?,
        },
        other => return Err(format!("unknown loss_type {other}")),
    };
    let settings = TrlSettings {
        loss,
        by_sequence: match case.text("importance_sampling_level")? {
            "token" => false,
            "sequence" => true,
            other => return Err(format!("unknown importance_sampling_level {other}")),
        },
        low: case.number("epsilon_low")?,
        high: case.number("epsilon_high")?,
        delta: case.optional("delta"),
        beta: case.number("beta")?,
        unbiased_kl: case.flag("use_bias_correction_kl")?,
        off_policy_max: case.optional("off_policy_mask_threshold"),
        tokens_max: case.number("max_completion_length")?,
        items: case.number("num_items_in_batch")?,
    };
    let mask = case.mask()?;
    // One advantage per sequence, given on every token or once.
    let advantages = match case.vector("advantages") {
        Ok(advantages) => advantages,
        Err(_) => {
            let matrix = case.matrix("advantages")?;
            (0..matrix.rows())
                .map(|row| matrix.row(row).first().copied().unwrap_or(0.0))
                .collect()
        }
    };
    let (new, old) = (case.matrix("log_prob")?, case.matrix("old_log_prob")?);
    let (reference, rollout) = (
        case.matrix("ref_log_prob")?,
        case.matrix("rollout_log_prob")?,
    );
    let correction = case.matrix("rollout_is_weights")?;
    let result = trl_loss(
        &settings,
        &TrlInputs {
            logprob: &new,
            old: &old,
            reference: &reference,
            rollout: &rollout,
            advantages: &advantages,
            mask: &mask,
            correction: case.flag("is_ratio")?.then_some(&correction),
        },
    );
    Ok(json!({
        "loss": plain(result.loss),
        "grad_log_prob": rows(&result.gradient),
        "metrics": named(&result.metrics, ""),
    }))
}

fn others(function: &str, case: &Case<'_>, expected: &Value) -> Result<Value, String> {
    Ok(match function {
        "value_loss" => {
            let mask = case.mask()?;
            let result = value_loss(
                &case.matrix("vpreds")?,
                &case.matrix("values")?,
                &case.matrix("returns")?,
                &case.weights(case.text("agg")?, &mask)?,
                &mask,
                case.number("cliprange_value")?,
            );
            json!({
                "loss": result.loss,
                "clipfrac": result.clipped,
                "grad_vpreds": rows(&result.gradient),
            })
        }
        "kl_penalty" => {
            let kind = case.text("kind")?;
            let estimator = match kind.trim_end_matches('+') {
                "k1" => KlEstimator::K1,
                "abs" => KlEstimator::Abs,
                "k2" => KlEstimator::K2,
                "k3" => KlEstimator::K3,
                other => return Err(format!("unknown kind {other}")),
            };
            let mask = case.mask()?;
            let weights = case.weights("token-mean", &mask)?;
            let (new, reference) = (case.matrix("log_prob")?, case.matrix("ref_log_prob")?);
            let (mut values, mut slopes) = (Vec::new(), Vec::new());
            for row in 0..mask.rows() {
                let own = (0..mask.columns()).map(|column| {
                    let (value, slope) = kl_token(
                        new.row(row)[column],
                        reference.row(row)[column],
                        estimator,
                        kind.ends_with('+'),
                    );
                    (value, slope * weights.row(row)[column])
                });
                let (own_values, own_slopes): (Vec<f64>, Vec<f64>) = own.unzip();
                values.push(own_values);
                slopes.push(own_slopes);
            }
            json!({ "value": values, "grad_log_prob_of_token_mean": slopes })
        }
        "rewards_with_kl" => rows(&rewards_with_kl(
            &case.matrix("dense_rewards")?,
            &case.matrix("old_log_prob")?,
            &case.matrix("ref_log_prob")?,
            case.number("kl_ratio")?,
        )),
        "adaptive_kl_controller" => {
            let mut control = AdaptiveKl {
                coefficient: case.number("init_kl_coef")?,
                target: case.number("target_kl")?,
                horizon: case.number("horizon")?,
            };
            let steps = expected.as_array().ok_or("expected a list of steps")?;
            let mut found = Vec::new();
            for step in steps {
                let number = |name: &str| {
                    step.get(name)
                        .and_then(Value::as_f64)
                        .ok_or_else(|| format!("a step has no {name}"))
                };
                let (kl, count) = (number("kl")?, number("n_steps")?);
                control.update(kl, count);
                found
                    .push(json!({ "kl": kl, "n_steps": count, "coef_after": control.coefficient }));
            }
            found.into()
        }
        "entropy" | "logprobs_from_logits" => distributions(function, case)?,
        _ => return Err("unknown function".to_owned()),
    })
}

fn distributions(function: &str, case: &Case<'_>) -> Result<Value, String> {
    let mask = case.mask()?;
    let logits: Vec<Vec<Vec<f64>>> = serde_json::from_value(case.input("logits")?.clone())
        .map_err(|error| format!("logits: {error}"))?;
    let weights = case.weights("token-mean", &mask)?;
    let labels = match function {
        "entropy" => None,
        _ => Some(case.matrix("labels")?),
    };
    let (mut values, mut gradients) = (Vec::new(), Vec::new());
    for (row, of_row) in logits.iter().enumerate() {
        let (mut own_values, mut own_gradients) = (Vec::new(), Vec::new());
        for (column, logits) in of_row.iter().enumerate() {
            let (value, gradient, weight) = match &labels {
                None => {
                    let (value, gradient) = entropy(logits);
                    (value, gradient, weights.row(row)[column])
                }
                Some(labels) => {
                    let label = labels.row(row)[column] as usize;
                    let (value, gradient) = logprob(logits, label, case.number("temperature")?)
                        .ok_or("a label is not in the vocabulary")?;
                    (value, gradient, mask.row(row)[column])
                }
            };
            own_values.push(value);
            own_gradients.push(gradient.iter().map(|g| g * weight).collect::<Vec<_>>());
        }
        values.push(own_values);
        gradients.push(own_gradients);
    }
    Ok(match labels {
        None => json!({ "entropy": values, "grad_logits_of_token_mean": gradients }),
        Some(_) => json!({ "logprob": values, "grad_logits_of_masked_sum": gradients }),
    })
}
