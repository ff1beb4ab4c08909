;; Has a component of minus infinity.
(module
  ;;! include reward

  (data (i32.const 1300) "part")
  (func $odd (param $result i32)
    (i32.store offset=16 (local.get $result) (i32.const 512))
    (i32.store offset=20 (local.get $result) (i32.const 1))
    (i32.store (i32.const 512) (i32.const 1300))
    (i32.store (i32.const 516) (i32.const 4))
    (f64.store (i32.const 520) (f64.const -inf)))
)
