;; Loops in `describe`.
(module
  ;;! include memory
  ;;! include check-settings
  ;;! include range
  ;;! include scores
  (func $odd (param i32))
  (func (export "querl:plugin/info@0.1.0#describe") (result i32)
    (loop $again
      (br $again))
    (i32.const 0))
)
