;; Loops when the host allocates memory for the arguments.
(module
  ;;! include describe
  ;;! include check-settings
  ;;! include range
  ;;! include scores
  (memory (export "memory") 2)
  (func $odd (param i32))
  (func $allocate (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
    (loop $again
      (br $again))
    (i32.const 0))
)
