;; Exports a range of one number instead of two.
;;! lacks rewards range: func() -> bounds;
;;! adds rewards range: func() -> f64;
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include scores
  (func $odd (param i32))
  (func (export "querl:plugin/rewards@0.1.0#range") (result f64)
    (f64.const 1))
)
