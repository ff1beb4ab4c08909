;; Declares the range minus infinity to infinity.
(module
  ;;! include memory
  ;;! include describe
  ;;! include check-settings
  ;;! include scores
  (func $odd (param i32))
  (func (export "querl:plugin/rewards@0.1.0#range") (result i32)
    (f64.store (i32.const 192) (f64.const -inf))
    (f64.store (i32.const 200) (f64.const inf))
    (i32.const 192))
)
