;; Scores infinity.
(module
  ;;! include reward

  (func $odd (param $result i32)
    (f64.store offset=8 (local.get $result) (f64.const inf)))
)
